"""Files that a person names, or that others read while they change: the whole new one is there, or what was there
before.

A text is written beside its place and renamed. A link stays one: what it points to is replaced. What is no plain file
(/dev/stdout, a pipe that a
shell made) cannot be renamed over and is written to as it is.

Where things of this user are kept between runs: $MESHWRIGHT_CACHE, else $XDG_CACHE_HOME/meshwright, else
~/.cache/meshwright (XDG 0.8).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from meshwright.core.errors import InputError

MAX_FILE_NAME_BYTES = 255
"""Bytes of a file's name."""


def path_from_text(text: str) -> Path:
    """Returns the path that `text` names, which may be a name of another kind.

    Raises: InputError where no file can have that name, so that asking whether one does cannot fail.
    """
    if "\0" in text or any(len(part.encode("utf-8", "replace")) > MAX_FILE_NAME_BYTES for part in text.split("/")):
        raise InputError(f"{text!r}: neither a file nor anything else has such a name")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text!r}: there is no such user; write the folder in full") from None


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """`text` as the file `path`, with the rights that it had; `private`: readable by this user alone. Raises OSError
    that names `path`."""
    try:
        before = path.stat().st_mode if path.exists() else None
        if before is not None and not stat.S_ISREG(before):
            path.write_text(text, encoding="utf-8")
        else:
            _replace_file(Path(os.path.realpath(path)), text, 0o600 if private else before and stat.S_IMODE(before))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace_file(path: Path, text: str, rights: int | None) -> None:
    """`rights` None: those that this user gives to new files."""
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
    """Where this user's cache is; it need not exist yet."""
    if chosen := os.environ.get("MESHWRIGHT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"
