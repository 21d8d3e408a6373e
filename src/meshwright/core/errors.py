"""Defines the exceptions of the project, and translates errors of the system. Each class has an exit code of the
command line.

    MeshwrightError          1  the job failed
    ├── InputError           2  the user's input is wrong (also a ValueError)
    │   └── PlanRefused      2  under this plan the first step would differ from one device; every rank raises it
    ├── NothingFits          3  no plan fits the devices
    ├── VerificationFailed   4  the run does not compute what one device computes
    └── Interrupted         75  preempted or interrupted; the same command resumes the job

A message is one line with the error, its location, the numbers and the remedy. `assert` is used for internal
invariants.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable

from meshwright.core.messages import Message, alternatives, join_messages

MAX_SHOWN_CHARACTERS = 120
"""Number of characters that a message shows of a word. Only words of at least twice this length are shortened."""
_LONG_WORD = re.compile(rf"(\S{{{MAX_SHOWN_CHARACTERS}}})\S{{{MAX_SHOWN_CHARACTERS},}}")


class MeshwrightError(Exception):
    """Reports that the job failed."""

    exit_code = 1
    raised_by: int | None = None
    """The rank that raised the error first, if this rank failed only because it waited for that rank, otherwise
    None.
    """


class InputError(MeshwrightError, ValueError):
    """Reports an error in the user's input: a name, a number, a file. The message shows only the beginning of very long
    words.

    >>> len(str(InputError(f"steps {'9' * 5000}: too large")))
    141
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(_LONG_WORD.sub(r"\1[...]", message) if _LONG_WORD.search(message) else message)


class PlanRefused(InputError):
    """Reports that the first step under this plan would differ from the result on one device. All ranks raise the error
    together, so that the job can try another plan."""


class NothingFits(MeshwrightError):
    """Reports that no legal plan fits in the memory of the devices."""

    exit_code = 3


class VerificationFailed(MeshwrightError):
    """Reports that the loss, the gradients or the counts differ from those of one device."""

    exit_code = 4


class Interrupted(MeshwrightError):
    """Reports that the job was stopped from outside after saving everything. The same command resumes the job."""

    exit_code = 75


DISK_ERROR_REMEDIES = {
    errno.ENOSPC: Message("make room"),
    errno.EDQUOT: Message("remove files of this user, or ask for a larger quota"),
    errno.EROFS: Message("mount the disk for writing, or choose another folder"),
    errno.EIO: Message("the disk or the connection to it fails: see the kernel log"),
    errno.ETIMEDOUT: Message("the disk or the connection to it fails: see the kernel log"),
    errno.ESTALE: Message("the network file system has lost the file: mount it anew"),
    errno.ENOTEMPTY: Message("another program still writes into the folder"),
    errno.EACCES: Message("give this user permission"),
    errno.EPERM: Message("give this user permission"),
    errno.EISDIR: Message("move it away, then start again"),
    errno.ELOOP: Message("move it away, then start again"),
    errno.EINVAL: Message("move it away, then start again"),
    errno.ENOLCK: Message("mount the file system with locks, or choose another folder"),
}
"""Remedies for disk errors by errno."""


def describe_disk_error(error: OSError, path: str) -> str:
    """Returns one line with `path`, the system's message, the name of the errno and the remedy.

    >>> describe_disk_error(OSError(5, "Input/output error"), "runs/a/records.jsonl")
    'runs/a/records.jsonl: Input/output error (EIO); the disk or the connection to it fails: see the kernel log'
    """
    remedy = DISK_ERROR_REMEDIES.get(error.errno or 0)
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    line = Message("{path}: {reason} ({name})", path=path, reason=error.strerror, name=name)
    return join_messages("; ", (line, remedy)) if remedy else line


STORAGE_FAILURE_ERRNOS = (errno.EIO, errno.EROFS, errno.ESTALE)
"""Error numbers that report a failure of the storage device itself and not of one operation."""


def translate_system_error(error: BaseException, words: Iterable[str]) -> BaseException:
    """Returns the error of this package that corresponds to an error of the system, any other error unchanged.

    The translated errors are Ctrl-C, a full disk, a failing disk, too many open files, and any error about a path that
    begins with one of `words`, the arguments of the command.

    >>> error = FileNotFoundError(2, "No such file or directory", "/proc/out/plan.json")
    >>> translate_system_error(error, ["--save", "/proc/out/plan.json"])
    InputError("'/proc/out/plan.json': No such file or directory; name another path")
    >>> translate_system_error(OSError(28, "No space left on device"), [])
    MeshwrightError('the disk is full (No space left on device): make room, then run the same command again')
    >>> translate_system_error(OSError(24, "Too many open files"), [])  # doctest: +ELLIPSIS
    MeshwrightError('no more files can be opened (Too many open files): raise the limit (`ulimit -n`), ...')
    """
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(Message("interrupted; run the same command again to continue"))
    if not isinstance(error, OSError):
        return error
    path = str(error.filename or "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MeshwrightError(
            Message(
                "the disk is full ({path}): make room, then run the same command again", path=path or error.strerror
            )
        )
    if error.errno in STORAGE_FAILURE_ERRNOS and path:
        return MeshwrightError(describe_disk_error(error, path))
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MeshwrightError(
            Message(
                "no more files can be opened ({strerror}): raise the limit (`ulimit -n`), then run the same command "
                "again",
                strerror=error.strerror,
            )
        )
    named = any(
        path.startswith(word.rpartition("=")[2].rstrip("/") or "/") for word in words if "/" in word or word == path
    )
    return (
        InputError(Message("{path!r}: {reason}; name another path", path=path, reason=error.strerror))
        if path and named
        else error
    )


MAX_SIMILARITY_GAP = 0.05
"""A further name is suggested if its similarity is at most this much lower than that of the nearest name. Similarities
are between 0 and 1 (`difflib.SequenceMatcher.ratio`)."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a clause for a message with the names in `known` that are most similar to `word`, '' if none is similar.

    >>> did_you_mean("memroy", ["memory", "peak"])
    "; did you mean 'memory'?"
    >>> did_you_mean("sequnce", ["sequence", "reduce"])
    "; did you mean 'sequence'?"
    >>> did_you_mean("zebra", ["memory"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    similarity = [difflib.SequenceMatcher(None, name, word).ratio() for name in near]
    near = [name for name, share in zip(near, similarity, strict=True) if share > similarity[0] - MAX_SIMILARITY_GAP]
    return Message("; did you mean {names}?", names=alternatives(map(repr, near))) if near else ""
