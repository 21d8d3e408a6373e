"""Files that survive a power cut: written whole, flushed, then named. Everything the checkpoint room does to a disk goes through here.

Promise: a name appears only when its bytes are durable; a reader never follows a link; nothing is readable by other users (0700, 0600).
Source: the order write, fsync, rename, fsync of the parent folder (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

CHUNK = 8 * 2**20
_LEFT_OVER = re.compile(r"\.(step-|latest\.).*\.(tmp|trash)")


def make_folder(path: Path) -> None:
    """`path` and its missing parents, each for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def write_file(path: Path, blocks: Iterable[memoryview | bytes], durable: bool = True) -> int:
    """A new file of `blocks`, durable when this returns. Returns its bytes. Raises OSError: there is no half-written success."""
    total = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for block in blocks:
            rest = memoryview(block)
            total += len(rest)
            while rest:
                rest = rest[os.write(handle, rest) :]
        if durable:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # reading it back must mean reading the disk
    finally:
        os.close(handle)
    return total


def sync_folder(path: Path) -> None:
    """Names in `path` are durable when this returns."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """The file or folder `path`, if there. A folder first loses its name: a crash here leaves no half of it under a name that counts."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".{path.name}.{os.urandom(4).hex()}.trash"))
        sync_folder(path.parent)
    shutil.rmtree(path)


def sweep(folder: Path) -> None:
    """Removes what saves that were cut short left in a folder of checkpoints. Nobody else may be saving there."""
    for name in os.listdir(folder):
        if _LEFT_OVER.fullmatch(name):
            remove(folder / name)


def open_file(path: Path) -> int:
    """A handle for reading a plain file that is no link."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_into(handle: int, offset: int, target: memoryview) -> None:
    """Fills `target` from `offset`. Raises EOFError when the file ends before."""
    while target:
        count = os.preadv(handle, [target[: 2**30]], offset)
        if not count:
            raise EOFError(offset)
        offset += count
        target = target[count:]


def stream(handle: int, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) in chunks of bounded size; each is valid until the next is asked for."""
    room = memoryview(bytearray(min(CHUNK, max(stop - start, 0))))
    while start < stop:
        part = room[: stop - start]
        read_into(handle, start, part)
        yield part
        start += len(part)


def digest_of(handle: int, start: int, stop: int) -> str:
    """xxh3 of bytes [start, stop)."""
    digest = xxhash.xxh3_64()
    for part in stream(handle, start, stop):
        digest.update(part)
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """What this user may still write under `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
