"""Replaces files atomically: a process that reads the file gets either the complete old text or the complete new text.
The command line and the data cache use it for files that a user names or that other processes read.

The text is written to a temporary file in the folder of the target, which is then renamed. If the path is a symbolic
link, the target of the link is replaced. A path that is not a regular file (/dev/stdout, a shell's pipe) cannot be
replaced by a rename, so it is written directly.

The user's cache folder is the first of these that is set: $MESHWRIGHT_CACHE, $XDG_CACHE_HOME/meshwright,
~/.cache/meshwright (XDG 0.8).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

MAX_FILE_NAME_BYTES = 255
"""Maximum number of bytes of a file name."""


def path_from_text(text: str) -> Path:
    """Returns `text` as a path, with ~ expanded. The text may be something else, such as the name of a model.

    Raises: InputError if no file can have this name, or if ~USER names an unknown user. After this check, testing
    whether the path exists cannot fail.
    """
    if "\0" in text or any(len(part.encode("utf-8", "replace")) > MAX_FILE_NAME_BYTES for part in text.split("/")):
        raise InputError(
            Message("{text!r} is not a valid name: it has a NUL character or a part of more than 255 bytes", text=text)
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(Message("{text!r}: there is no such user; write the folder in full", text=text)) from None


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Writes `text` to the file `path`. If `private` is set, only this user can read the file. Otherwise an existing
    file keeps its permissions.

    Raises: OSError that names `path`.
    """
    try:
        before = path.stat().st_mode if path.exists() else None
        if before is not None and not stat.S_ISREG(before):
            path.write_text(text, encoding="utf-8")
        else:
            _replace_file(Path(os.path.realpath(path)), text, 0o600 if private else before and stat.S_IMODE(before))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_output_folder(folder: Path | None) -> None:
    """Raises InputError if a command cannot make `folder` because a file has its name. None is valid."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(Message("{folder!r} is a file; name a folder", folder=str(folder)))


def _replace_file(path: Path, text: str, rights: int | None) -> None:
    """Replaces the file at `path`. `rights` are its permissions, None for the default of new files."""
    fresh = path.with_name(f".meshwright-{os.getpid()}-{os.urandom(4).hex()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if rights is None else 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            if rights is not None:
                os.fchmod(handle, rights)
            file.write(text)
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Returns the cache folder of this user. The folder may not exist yet."""
    if chosen := os.environ.get("MESHWRIGHT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"
