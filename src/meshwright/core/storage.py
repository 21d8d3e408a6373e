"""Performs every operation on the files of a run folder: checkpoints, records, events, reports. No other module opens,
lists, renames or removes these files.

Guarantees: a file that other processes read gets its final name only when its bytes are durable. Files and folders that
this module makes are private to this user (modes 0600 and 0700), except files of `replace_file` without `private`.
Reading opens only regular files and by default follows no link. Opening does not block on a pipe. Reading does not use
much more memory than the file uses on disk. An error is an OSError that names the path, and `describe_failure` turns it
into one line with a remedy. An operation with a stale handle of a network file system (ESTALE) is repeated.

The functions have no time limit, because a process cannot interrupt its own call to a disk that does not answer. The
process reports that it waits (`report_if_overdue`), and its parent process kills it (elastic/writer_supervisor.py,
elastic/hang_detector.py). A process that must not stop, such as a supervisor, calls them in a background thread
(storage_deadline.py, append_file.py).

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
"""Number of bytes that are read at a time."""

FLUSH_INTERVAL_BYTES = 16 * 2**20
"""Number of bytes after which a large file is synced while it is written, so that a slow disk shows progress."""

MAX_ATTEMPTS = 3
"""Maximum number of attempts of an operation whose file handle is stale, and of removing a folder to which another
process still writes."""

SPARSE_SIZE_RATIO = 100
"""If less than 1 / SPARSE_SIZE_RATIO of the bytes of a file are on disk, the file was never written completely."""

OVERDUE_SECONDS = 5.0
"""Seconds of waiting for a disk after which the delay is reported."""

OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for opening files. With them, opening a pipe does not wait for the other end."""

_LEFTOVER_NAME = re.compile(r"\.(step-|latest\.).*\.(tmp|trash)")
ResultT = TypeVar("ResultT")


class StorageFailed(MeshwrightError):
    """Reports that the disk of a run folder rejects an operation or fails. The same command may succeed later."""


@contextlib.contextmanager
def failures_as_one_line(path: Path) -> Iterator[None]:
    """Turns an OSError inside the context into a StorageFailed with a message of one line. The message names `path` if
    the error does not name a path."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(describe_failure(error, path)) from None


def describe_failure(error: OSError, path: Path | str = "") -> str:
    """Returns one line with the path, the failure and the remedy. `path` is used if the error does not name a path."""
    return describe_disk_error(error, str(error.filename or path))


@contextlib.contextmanager
def report_if_overdue(say: Callable[[], None], seconds: float = OVERDUE_SECONDS) -> Iterator[None]:
    """Calls `say` from another thread when the code inside the context takes longer than `seconds`."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- folders


def _retry_stale_handle(call: Callable[[], ResultT]) -> ResultT:
    """Returns `call()`. If a network file system reports a stale handle, repeats the call, up to MAX_ATTEMPTS calls in
    all, because a new path lookup returns a valid handle."""
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def list_names(folder: Path) -> list[str]:
    """Returns the sorted names in `folder`, [] if the folder does not exist. Raises OSError if the folder cannot be
    read."""
    try:
        return sorted(_retry_stale_handle(lambda: os.listdir(folder)))
    except FileNotFoundError:
        return []


def is_folder(path: Path) -> bool:
    """Returns whether `path` is a folder or a link to a folder. Raises OSError if the type cannot be determined."""
    try:
        return stat.S_ISDIR(_retry_stale_handle(lambda: os.stat(path)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_file(path: Path) -> bool:
    """Returns whether `path` is a regular file or a link to a regular file. Raises OSError if the type cannot be
    determined."""
    try:
        return stat.S_ISREG(_retry_stale_handle(lambda: os.stat(path)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def path_exists(path: Path) -> bool:
    """Returns whether `path` exists. A broken link counts as existing. Raises OSError if the disk fails."""
    try:
        _retry_stale_handle(lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_present(path: Path) -> bool:
    """Returns whether `path` exists, as `path_exists` does. Raises StorageFailed if the disk fails."""
    with failures_as_one_line(path):
        return path_exists(path)


def make_folder(path: Path) -> None:
    """Makes `path` and its missing parents, accessible only to this user."""
    missing = [folder for folder in (path, *path.parents) if not is_folder(folder)]
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # another process may have made the folder
            if not is_folder(folder):
                raise
        sync_folder(folder.parent)


def make_new_folder(path: Path) -> None:
    """Makes `path`, accessible only to this user. Raises FileExistsError if it exists."""
    os.mkdir(path, 0o700)


def sync_folder(path: Path) -> None:
    """Makes the names in the folder `path` durable."""
    handle = _retry_stale_handle(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        os.fsync(handle)
    finally:
        close_quietly(handle)


def rename(source: Path, target: Path) -> None:
    """Renames `source` to `target`. An existing file `target` is replaced."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Removes the file, link or folder `path` if it exists. A folder is renamed first, so that a crash leaves no
    incomplete folder under a valid name.

    The target of a link is not removed.
    """
    try:
        mode = _retry_stale_handle(lambda: os.lstat(path)).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return
    if not path.name.startswith("."):
        path = move_to_trash(path)
        sync_folder(path.parent)
    _remove_tree(path)


def move_to_trash(path: Path) -> Path:
    """Renames a checkpoint to a name that `remove_leftovers` removes later. Returns the new path."""
    trash = path.with_name(f".{path.name}.{os.urandom(4).hex()}.trash")
    os.rename(path, trash)
    return trash


def _remove_tree(folder: Path) -> None:
    """Removes `folder` with its contents. Files that appear during the removal are also removed, such as those that a
    network file system still has open."""
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
    """Removes `path` as `remove` does. Returns the error if something could not be removed, otherwise None."""
    try:
        remove(path)
    except OSError as error:
        return error
    return None


def remove_leftovers(folder: Path, retained: Path | None = None) -> None:
    """Removes the remains of interrupted saves and removals from a folder of checkpoints, except `retained`. No other
    process may save into this folder meanwhile. Files that cannot be removed are ignored. If the disk does not answer,
    the function waits for it."""
    for name in list_names(folder):
        if _LEFTOVER_NAME.fullmatch(name) and folder / name != retained:
            remove_if_possible(folder / name)


def free_bytes(path: Path) -> int:
    """Returns the number of bytes that are free for this user on the file system of `path`."""
    status = _retry_stale_handle(lambda: os.statvfs(path))
    return status.f_bavail * status.f_frsize


# --- writing


def write_file(path: Path, blocks: Iterable[memoryview | bytes], durable: bool = True, rights: int = 0o600) -> int:
    """Writes the new file `path` from `blocks` and returns its size in bytes. If `durable` is set, the file is durable
    on return. `rights` are the permissions.

    Raises: OSError that names `path`, if the file exists or is not written completely.
    """
    total = flushed = 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, rights)
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
                with contextlib.suppress(OSError):  # drops cached pages, so that a later read comes from the disk
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            close_quietly(handle)
            raise
        os.close(handle)  # a network file system may report a full disk only here
    except OSError as error:
        raise with_path(error, path) from None
    return total


def replace_file(path: Path, content: str | bytes, private: bool = False) -> None:
    """Writes `content` to the file `path`. Another process reads either the complete new file or the previous file.
    `private`: whether only this user may read the file; otherwise it has the default permissions for new files. A pipe,
    a device or a link with this name is also replaced; nothing is written through it.

    Raises: OSError that names `path`.
    """
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        data = content.encode() if isinstance(content, str) else content
        write_file(fresh, [data], rights=0o600 if private else 0o666)
        os.rename(fresh, path)
        sync_folder(path.parent)
    except OSError as error:
        remove_if_possible(fresh)
        raise OSError(error.errno, error.strerror, str(path)) from None


def open_for_append(path: Path) -> int:
    """Returns a file descriptor for `append_line`, or for a log. The file is created if it does not exist."""
    return _open_checked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def open_for_update(path: Path, create: bool = False) -> int:
    """Returns a file descriptor for reading and writing a regular file, such as a lock.

    Raises: FileNotFoundError if the file does not exist, unless `create` is set.
    """
    return _open_checked(path, os.O_RDWR | (os.O_CREAT if create else 0))


def _open_checked(path: Path, flags: int) -> int:
    handle = _retry_stale_handle(lambda: os.open(path, flags | OPEN_FLAGS, 0o600))
    try:
        _check_regular(handle, path)
    except BaseException:
        close_quietly(handle)
        raise
    return handle


def overwrite(handle: int, data: bytes) -> None:
    """Replaces the contents of an open file by `data`. This is not atomic."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)


def append_row(path: Path, line: str) -> None:
    """Appends `line` to the file `path`. Makes the file and its folder if they do not exist."""
    make_folder(path.parent)
    handle = open_for_append(path)
    try:
        append_line(handle, line.encode() + b"\n")
    finally:
        close_quietly(handle)


def append_line(handle: int, line: bytes) -> None:
    """Writes `line` at the end of an open file, after a line end if a killed writer has left an incomplete line.

    Raises: OSError, after a partial write has been undone.
    """
    end = os.lseek(handle, 0, os.SEEK_END)
    try:
        write_bytes(handle, line if not end or os.pread(handle, 1, end - 1) == b"\n" else b"\n" + line)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, end)
        raise


def write_bytes(handle: int, content: bytes) -> None:
    """Writes all of `content` to an open file. Raises OSError."""
    while content:
        content = content[os.write(handle, content) :]


# --- reading


def open_regular_file(path: Path, links: bool = False) -> int:
    """Returns a file descriptor for reading a regular file. `links`: whether `path` may be a symbolic link.

    Raises: OSError. If `path` is not a regular file, the message names the actual type.
    """
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
    """Returns the size of an open file in bytes."""
    return os.fstat(handle).st_size


def file_size(path: Path) -> int:
    """Returns the size of the file at `path` in bytes. A link is not followed."""
    return os.lstat(path).st_size


def close_quietly(handle: int) -> None:
    """Closes the file descriptor `handle` and ignores errors. The caller must not depend on the last write."""
    with contextlib.suppress(OSError):
        os.close(handle)


def is_sparse(handle: int) -> bool:
    """Returns whether less than 1 / SPARSE_SIZE_RATIO of the bytes of an open file are on disk. If the file system
    cannot report holes, returns False."""
    size = handle_size(handle)
    there = at = 0
    while there * SPARSE_SIZE_RATIO < size:
        try:
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
        except OSError as error:
            # ENXIO means that no data follows. Any other error means that the file system cannot report holes.
            return error.errno == errno.ENXIO
        there += at - begin
    return False


def read_into(handle: int, offset: int, target: memoryview) -> None:
    """Fills `target` with the bytes of an open file from `offset`. Raises EOFError if the file ends before `target` is
    full."""
    while target:
        count = os.preadv(handle, [target[: 2**30]], offset)
        if not count:
            raise EOFError(offset)
        offset += count
        target = target[count:]


def read_file(path: Path, start: int = 0, most: int | None = None, links: bool = False) -> bytes:
    """Returns at most `most` bytes (None: all) of the text file `path` from offset `start`. A negative `start` counts
    from the end. `links`: whether `path` may be a symbolic link.

    Raises: OSError that names `path`. Also raises it for a chunk of READ_CHUNK_BYTES zeros, which a sparse file may
    have but a text file does not. Therefore reading never uses much more memory than the file takes on disk.
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
    """Returns the text of `path`, None if there is no such file. Invalid bytes become U+FFFD. Raises StorageFailed if
    the file cannot be read."""
    try:
        return read_file(path, links=True).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(describe_failure(error, path)) from None


def read_chunks(handle: int, start: int, stop: int) -> Iterator[memoryview]:
    """Yields bytes [start, stop) of an open file in chunks of at most READ_CHUNK_BYTES. A chunk is valid until the next
    chunk is requested. Raises EOFError if the file ends before `stop`."""
    room = memoryview(bytearray(min(READ_CHUNK_BYTES, max(stop - start, 0))))
    while start < stop:
        part = room[: stop - start]
        read_into(handle, start, part)
        yield part
        start += len(part)


def digest_range(handle: int, start: int, stop: int) -> str:
    """Returns the xxh3 digest of bytes [start, stop) of an open file. Raises EOFError if the file ends before
    `stop`.
    """
    digest = xxhash.xxh3_64()
    for part in read_chunks(handle, start, stop):
        digest.update(part)
    return digest.hexdigest()


def with_path(error: OSError, path: Path) -> OSError:
    """Returns `error` with `path` as its filename if it has none."""
    return error if error.filename else OSError(error.errno, error.strerror, str(path))
