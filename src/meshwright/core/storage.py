"""Performs every operation on the files of a run folder: checkpoints, records, events, reports. Nothing else opens,
lists, renames or removes them.

Guarantees: a name appears only when its bytes are durable; nothing is readable by other users (0700, 0600). A reader
follows no link, waits for no
pipe and reads no device: only regular files are opened. What is read takes no more memory than the file takes on disk.
An error
is an OSError that names its path, and `failure` turns it into one line with a remedy; a lost handle of a network file
system (ESTALE) is opened anew first.
No call here has a time limit, since no process can interrupt its own call to a disk that does not answer: whoever waits
for one says so (`overdue`),
and whoever started the process ends it (elastic/writer_supervisor.py, elastic/hang_detector.py).
Source: the order write, fsync, rename, fsync of the parent folder (Pillai et al., All File Systems Are Not Created
Equal, OSDI 2014).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from meshwright.core.errors import MeshwrightError, describe_disk_error

READ_CHUNK_BYTES = 8 * 2**20
"""Bytes that are read at a time."""

FLUSH_INTERVAL_BYTES = 16 * 2**20
"""Bytes after which a large file is flushed: a disk that still works shows progress at least that often."""

MAX_ATTEMPTS = 3
"""How often an operation is tried whose file handle a network file system has lost, or a folder is removed into which
files still come."""

SPARSE_SIZE_RATIO = 100
"""A file of which less than this part of its bytes is on disk is not one that was written here."""

OVERDUE_SECONDS = 5.0
"""Seconds of waiting for a disk after which a line is printed."""

OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags under which opening a pipe does not wait for its other end."""

_LEFTOVER_NAME = re.compile(r"\.(step-|latest\.).*\.(tmp|trash)")
ResultT = TypeVar("ResultT")


class StorageFailed(MeshwrightError):
    """The disk of a run folder refuses or fails. The same command may succeed later."""


def describe_failure(error: OSError, path: Path | str = "") -> str:
    """What failed, where, and the remedy, on one line. `path` is for errors that name none."""
    return describe_disk_error(error, str(error.filename or path))


@contextlib.contextmanager
def report_if_overdue(say: Callable[[], None], seconds: float = OVERDUE_SECONDS) -> Iterator[None]:
    """Calls `say` from another thread when the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- folders
# ------------------------------------------------------------------------------------------------------------------


def _retry_stale_handle(call: Callable[[], ResultT]) -> ResultT:
    """`call()`, repeated while a network file system says that its handle is stale: looking the path up anew mends
    that."""
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def list_names(folder: Path) -> list[str]:
    """The names in `folder`, in order; none where it does not exist. Raises OSError where that cannot be known."""
    try:
        return sorted(_retry_stale_handle(lambda: os.listdir(folder)))
    except FileNotFoundError:
        return []


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder or a link to one. Raises OSError where that cannot be known."""
    try:
        return stat.S_ISDIR(_retry_stale_handle(lambda: os.stat(path)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def path_exists(path: Path) -> bool:
    """Whether `path` is anything, a link that leads nowhere included. Raises OSError where that cannot be known."""
    try:
        _retry_stale_handle(lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(path: Path) -> None:
    """Makes `path` and its missing parents, each for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not is_folder(folder)]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        sync_folder(folder.parent)


def make_new_folder(path: Path) -> None:
    """Makes `path`, for this user alone. Raises FileExistsError where it is there."""
    os.mkdir(path, 0o700)


def sync_folder(path: Path) -> None:
    """Makes the names in `path` durable."""
    handle = _retry_stale_handle(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        os.fsync(handle)
    finally:
        close_quietly(handle)


def rename(source: Path, target: Path) -> None:
    """Gives `source` the name `target`; a file of that name is replaced."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Removes the file, link or folder `path`, if there. A folder first loses its name: a crash here leaves no half of
    it under a name that counts.

    What a link points to stays.
    """
    try:
        mode = _retry_stale_handle(lambda: os.lstat(path)).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return
    if not path.name.startswith("."):
        trash = path.with_name(f".{path.name}.{os.urandom(4).hex()}.trash")
        os.rename(path, trash)
        sync_folder(trash.parent)
        path = trash
    _remove_tree(path)


def _remove_tree(folder: Path) -> None:
    """Removes `folder` and what is in it. Files that come while it is removed, as those that a network file system
    still has open, are removed too."""
    for left in reversed(range(MAX_ATTEMPTS)):
        for name in list_names(folder):
            path = folder / name
            try:
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    _remove_tree(path)
                else:
                    os.unlink(path)
            except FileNotFoundError:
                continue
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
                raise
        else:
            return


def remove_if_possible(path: Path) -> OSError | None:
    """`remove`, for what is in nobody's way: returns the error of what stays."""
    try:
        remove(path)
    except OSError as error:
        return error
    return None


def remove_leftovers(folder: Path) -> None:
    """Removes what saves that were cut short left in a folder of checkpoints. Nobody else may be saving there. What
    cannot be removed stays."""
    for name in list_names(folder):
        if _LEFTOVER_NAME.fullmatch(name):
            remove_if_possible(folder / name)


def free_bytes(path: Path) -> int:
    """What this user may still write under `path`."""
    status = _retry_stale_handle(lambda: os.statvfs(path))
    return status.f_bavail * status.f_frsize


# --- writing
# ------------------------------------------------------------------------------------------------------------------


def write_file(path: Path, blocks: Iterable[memoryview | bytes], durable: bool = True) -> int:
    """Writes a new file of `blocks`, durable when this returns. Returns its bytes. Raises OSError that names `path`:
    there is no half-written success."""
    total = flushed = 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    count = os.write(handle, rest[:FLUSH_INTERVAL_BYTES])
                    rest, total = rest[count:], total + count
                    if durable and total >= flushed + FLUSH_INTERVAL_BYTES:
                        os.fsync(handle)
                        flushed = total
            if durable:
                os.fsync(handle)
                with contextlib.suppress(OSError):  # reading it back is to mean reading the disk
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            close_quietly(handle)
            raise
        os.close(handle)  # a network file system may say only here that there was no room
    except OSError as error:
        raise with_path(error, path) from None
    return total


def open_for_append(path: Path) -> int:
    """A handle for `append`; the file is made where there is none."""
    handle = _retry_stale_handle(lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | OPEN_FLAGS, 0o600))
    try:
        _check_regular(handle, path)
    except BaseException:
        close_quietly(handle)
        raise
    return handle


def append_line(handle: int, line: bytes) -> None:
    """Writes `line` behind what is there. One that a kill has cut off is ended first. Raises OSError: what was written
    of it is taken back."""
    end = os.lseek(handle, 0, os.SEEK_END)
    rest = line if not end or os.pread(handle, 1, end - 1) == b"\n" else b"\n" + line
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, end)
        raise


# --- reading
# ------------------------------------------------------------------------------------------------------------------


def open_regular_file(path: Path, links: bool = False) -> int:
    """A handle for reading a regular file, which `links` may lead to. Raises OSError that says what else it is."""
    try:
        handle = _retry_stale_handle(lambda: os.open(path, os.O_RDONLY | OPEN_FLAGS | (0 if links else os.O_NOFOLLOW)))
    except OSError as error:
        if error.errno == errno.ELOOP:
            error = OSError(errno.ELOOP, "is a link, not a file", str(path))
        raise error from None
    try:
        _check_regular(handle, path)
    except BaseException:
        close_quietly(handle)
        raise
    return handle


def _check_regular(handle: int, path: Path) -> None:
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))


def handle_size(handle: int) -> int:
    """The bytes of an open file."""
    return os.fstat(handle).st_size


def file_size(path: Path) -> int:
    """The bytes of the file at `path`."""
    return os.lstat(path).st_size


def close_quietly(handle: int) -> None:
    """Closes what was read. That a disk complains then changes nothing of what was read."""
    with contextlib.suppress(OSError):
        os.close(handle)


def is_sparse(handle: int) -> bool:
    """Whether less than a hundredth of the file's bytes is on disk (SPARSE). Where a file system does not know its
    holes there are none."""
    size = handle_size(handle)
    there = at = 0
    while there * SPARSE_SIZE_RATIO < size:
        try:
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
        except OSError as error:
            return error.errno == errno.ENXIO  # no data from here on; any other error: it does not know
        there += at - begin
    return False


def read_into(handle: int, offset: int, target: memoryview) -> None:
    """Fills `target` from `offset`. Raises EOFError when the file ends before."""
    while target:
        count = os.preadv(handle, [target[: 2**30]], offset)
        if not count:
            raise EOFError(offset)
        offset += count
        target = target[count:]


def read_file(path: Path, start: int = 0, most: int | None = None, links: bool = False) -> bytes:
    """The bytes of the text file `path` from `start` on, `most` of them at most; a negative `start` counts from the
    end. `links` are followed where asked.

    Raises OSError that names `path`, also for a file with a hole of zeros, which no text has: memory stays below what
    is on disk.
    """
    try:
        handle = open_regular_file(path, links)
        try:
            at = max(0, handle_size(handle) + start) if start < 0 else start
            found = bytearray()
            while most is None or len(found) < most:
                part = os.pread(
                    handle,
                    READ_CHUNK_BYTES if most is None else min(READ_CHUNK_BYTES, most - len(found)),
                    at + len(found),
                )
                if not part:
                    break
                if len(part) == READ_CHUNK_BYTES and not part.strip(b"\0"):
                    raise OSError(
                        errno.EINVAL, "holds zeros instead of text: damaged, or not a file of Meshwright", str(path)
                    )
                found += part
        finally:
            close_quietly(handle)
    except OSError as error:
        raise with_path(error, path) from None
    return bytes(found)


def read_text(path: Path) -> str | None:
    """The text of `path`; None where there is no such file. Bytes that are no text become U+FFFD. Raises
    StorageFailed."""
    try:
        return read_file(path, links=True).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(describe_failure(error, path)) from None


def read_chunks(handle: int, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) in chunks of bounded size; each is valid until the next is asked for."""
    room = memoryview(bytearray(min(READ_CHUNK_BYTES, max(stop - start, 0))))
    while start < stop:
        part = room[: stop - start]
        read_into(handle, start, part)
        yield part
        start += len(part)


def digest_range(handle: int, start: int, stop: int) -> str:
    """xxh3 of bytes [start, stop)."""
    digest = xxhash.xxh3_64()
    for part in read_chunks(handle, start, stop):
        digest.update(part)
    return digest.hexdigest()


def with_path(error: OSError, path: Path) -> OSError:
    """`error` with the path that it is about."""
    return error if error.filename else OSError(error.errno, error.strerror, str(path))
