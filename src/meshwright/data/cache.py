"""Makes cached folders for tokenizers, token arrays and model descriptions in the user's cache directory
(core/files.py). A cached folder is either complete or absent.

Guarantees:
- A folder is written under a temporary name, and renamed after all its files are synced.
- One process builds a folder while others wait for a file lock. The kernel releases the lock when its owner dies.
- Leftovers of an interrupted build are removed by the next build.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder
from meshwright.core.messages import Message


def cached_folder(name: str, make: Callable[[Path], None], whole: Callable[[Path], bool]) -> Path:
    """Returns the folder `name` of the cache. If the folder is missing or `whole` returns False for it, the folder is
    built first: `make` receives an empty folder and fills it.

    Raises:
        InputError: the cache cannot be written.
    """
    folder = cache_folder() / name
    try:
        if whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(folder.parent / f".{name}.lock"):
            if not whole(folder):
                _build_folder(folder, make)
    except OSError as error:
        raise InputError(
            Message(
                "cache folder {parent!r} cannot be written ({reason}): set MESHWRIGHT_CACHE to a folder with room",
                parent=str(folder.parent),
                reason=error.strerror or error,
            )
        ) from None
    return folder


def _build_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Builds the folder. The caller has the lock, so an existing temporary folder is the leftover of a dead process."""
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left)
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        make(partial)
        for path in (*partial.iterdir(), partial):
            _sync_folder(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Locks `path` inside the context, so that only one process builds.

    The lock file is not removed: otherwise two processes could lock two different files with one name.
    """
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
