"""What is made once and kept: folders under the user's cache that are either whole or not there.

Promise: a folder is written under a temporary name, every file of it is synced, then it is renamed; one process makes
it while the others
wait (a lock that the kernel frees when its holder dies); what an interrupted run left is removed by the next one.
Place: core/files.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder


def cached_folder(name: str, make: Callable[[Path], None], whole: Callable[[Path], bool]) -> Path:
    """The folder `name` of the cache. Where it is missing, or not `whole`, `make` fills a new one first."""
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
            f"cache folder {str(folder.parent)!r} cannot be written ({error.strerror or error}): set MESHWRIGHT_CACHE to a folder with room"
        ) from None
    return folder


def _build_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Called with the lock held: whatever stands under a temporary name is a dead process's."""
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
    """One process at a time. The lock file stays: removing it would let two processes hold two files of one name."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
