"""Finds the rank that caused a failure (the culprit), and reports it in at most MAX_REPORT_LINES lines. The supervisor
uses it. The report begins with the rank and the cause.

If a rank fails, the other ranks lose their connections to it and fail too. The report only states how many they are.
The culprit is the first rank that was killed by a signal or raised an error other than a lost connection. Signals from
the supervisor do not count. If there is no such rank, the culprit is the first rank that lost a connection.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.cgroup_limits import cgroup_memory_limit
from meshwright.core.errors import InputError, MeshwrightError, translate_system_error
from meshwright.core.messages import Message, join_messages, mark_msgid
from meshwright.core.storage_deadline import read_tail

MAX_REPORT_LINES = 12
LOG_TAIL_BYTES = 1 << 18
"""The search for a stack trace reads only this number of bytes at the end of a log."""
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals on which Python writes a stack trace."""
SIGNAL_CAUSES = {
    "SIGABRT": mark_msgid(
        "killed by {signal}: a library aborted the process (gloo does so when ranks disagree on a size)"
    ),
    "SIGSEGV": mark_msgid(
        "killed by {signal}: a native library accessed invalid memory (under z3, weights that are read outside of "
        "the module that holds them)"
    ),
    "SIGBUS": mark_msgid(
        "killed by {signal}: a mapped file was truncated, its disk (--offload-to) can no longer be read, or /dev/shm "
        "is full"
    ),
}
"""The message about the likely cause, by signal."""
_PEER_LOST_PATTERN = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|gloo/transport|peer closed|socket (timeout"
    r"|closed)|failed to recv"
    r"|ncclRemoteError|remote process exited|Stop_waiting|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankExit:
    """The exit of one rank. `at`: its time in seconds on the supervisor's clock. `status`: the exit code, or the
    negative number of a signal.

    `error`, `message` and `place`: class, text and source location of the exception, as the rank has reported them.
    `known`: whether the exception is a MeshwrightError, whose text needs no explanation. `words`: what the supervisor
    or the node observed, such as a hang.
    """

    rank: int
    at: float
    status: int
    error: str = ""
    message: str = ""
    place: str = ""
    known: bool = False
    words: str = ""
    kills: int = 0
    """The number of OOM kills in the rank's cgroup from the start of its generation to its exit."""
    oom: bool = False
    """Whether `words` describes an OOM kill that the rank's node has detected."""
    watchdog: bool = False
    """Whether NCCL's watchdog has aborted the process, because a collective timed out or another rank was gone."""
    raised_by: int | None = None
    """The rank that raised the error, if this rank has only received the error from that rank; otherwise None."""

    @property
    def innocent(self) -> bool:
        """Returns whether the rank ended because of another rank: it lost a connection, received the other rank's
        error, or was aborted by NCCL's watchdog."""
        if self.raised_by is not None or self.watchdog:
            return True
        return not (self.known or self.words) and self.status >= 0 and bool(_PEER_LOST_PATTERN.search(self.message))


class RankFailed(MeshwrightError):
    """Raised if a rank failed. The message is the report."""


def is_oom(failure: RankExit) -> bool:
    """Returns whether the rank ran out of memory: its error says so, or it was killed by SIGKILL and the kernel has
    counted an OOM kill since its generation began.

    >>> is_oom(RankExit(0, 0.0, 1, "OutOfMemory", "rank 0 is out of memory in step 2", known=True))
    True
    """
    if failure.error in ("OutOfMemory", "OutOfMemoryError", "MemoryError"):
        return True
    killed = failure.status == -signal.SIGKILL
    return killed and (failure.oom or (not failure.words and failure.kills > 0))


def find_culprit(failures: Sequence[RankExit]) -> RankExit:
    """Returns the exit of the culprit (module docstring).

    >>> find_culprit([RankExit(0, 1.0, 1, "RuntimeError", "Connection reset by peer"), RankExit(2, 1.1, -9)]).rank
    2
    """
    guilty = [failure for failure in failures if not failure.innocent]
    return min(guilty or failures, key=lambda failure: failure.at)


def failure_cause(failure: RankExit) -> str:
    """Returns a text that says how the rank ended.

    >>> failure_cause(RankExit(1, 0.0, -9))
    "killed by SIGKILL (by someone's kill -9, or by the system, which was out of memory)"
    """
    if failure.words:
        return failure.words
    if failure.watchdog:
        return Message(
            "killed by SIGABRT: NCCL's watchdog aborted the process, because a collective did not end in time or "
            "another rank was gone"
        )
    if failure.status < 0:
        name = (
            signal.Signals(-failure.status).name
            if -failure.status in list(signal.Signals)
            else Message("signal {status}", status=-failure.status)
        )
        if name == "SIGKILL":
            return _kill_cause(failure.kills, cgroup_memory_limit())
        return Message(SIGNAL_CAUSES.get(name, mark_msgid("killed by {signal}")), signal=name)
    if failure.error:
        first = failure.message.strip().partition("\n")[0]
        return f"{failure.error}: {first}" if first != failure.error else failure.error
    return Message("ended with exit status {status} and no message", status=failure.status)


def _kill_cause(kills: int, limit: float) -> str:
    """Returns a text that explains a SIGKILL. `kills`: the number of OOM kills. `limit`: the memory limit of the cgroup
    in bytes, or infinity.

    >>> _kill_cause(2, 2.0**30)  # doctest: +NORMALIZE_WHITESPACE
    'killed by SIGKILL: by the system, which was out of memory: its control group is limited to 1.00 GiB (2
    killed so far); rc-full and off-optimizer-disk need less memory'
    """
    if not kills:
        return Message("killed by SIGKILL (by someone's kill -9, or by the system, which was out of memory)")
    if limit == float("inf"):
        return Message(
            "killed by SIGKILL: by the system, which was out of memory ({kills} killed so far); rc-full and "
            "off-optimizer-disk need less memory",
            kills=kills,
        )
    return Message(
        "killed by SIGKILL: by the system, which was out of memory: its control group is limited to {limit:bytes} "
        "({kills} killed so far); rc-full and off-optimizer-disk need less memory",
        kills=kills,
        limit=limit,
    )


def log_tail(log: Path, count: int) -> list[str]:
    """Returns the last `count` lines of a log that are not blank."""
    try:
        lines = read_tail(log, LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip()[:200] for line in lines if line.strip()][-count:]


def crash_location(log: Path) -> str:
    """Returns the source location where a crash signal ended a rank, or '' if it is unknown. It is the innermost frame
    outside of torch in the last stack trace that Python's faulthandler wrote (train/rank_main.py)."""
    try:
        said = read_tail(log, LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    stack = said.rpartition("Fatal Python error: ")[2].partition("Current thread ")[2].partition("\n\n")[0]
    frames = [
        frame
        for frame in re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
        if "/torch/" not in frame[0]
    ]
    return "{}:{} in {}".format(*frames[0]) if frames else ""


def diagnose(
    failures: Sequence[RankExit], world: int, log_of: Callable[[int], Path], why: str = "", instead: str = ""
) -> MeshwrightError:
    """Returns the error that the supervisor raises for `failures`: RankFailed with the report. If the culprit raised a
    MeshwrightError, the error has its message and exit code. `log_of`: returns the log of a rank. `why`: why the run
    was not retried. `instead`: a line about a plan that needs less memory."""
    first = find_culprit(failures)
    if first.known:
        words = Message("{reasons}", reasons=(first.message, instead)) if instead else first.message
        error = InputError(words) if first.status == InputError.exit_code else MeshwrightError(words)
        error.exit_code = first.status
        return error
    head = Message(
        "rank {rank} of {world} on {host}: {cause}" if first.rank >= 0 else "all {world} ranks on {host}: {cause}",
        rank=first.rank,
        world=world,
        host=socket.gethostname(),
        cause=failure_cause(first),
    )
    lines: list[str] = [head]
    lines += ["  " + each for each in (why, instead) if each]
    place = first.place or (
        crash_location(log_of(first.rank)) if first.rank >= 0 and -first.status in CRASH_SIGNALS else ""
    )
    if place:
        lines.append(Message("  at {place}", place=place))
    elif first.rank >= 0 and (first.status < 0 or not first.error):
        lines += [f"  | {line}" for line in log_tail(log_of(first.rank), 3)]
    others = [failure for failure in failures if failure is not first]
    innocent = sum(other.innocent for other in others)
    if failed := len(others) - innocent:
        many, one = mark_msgid("  {count} other ranks failed too"), mark_msgid("  {count} other rank failed too")
        lines.append(Message(many if failed > 1 else one, count=failed))
    if innocent:
        many = mark_msgid("  {count} other ranks lost the connection because of it")
        one = mark_msgid("  {count} other rank lost the connection because of it")
        lines.append(Message(many if innocent > 1 else one, count=innocent))
    lines.append(Message("  log: {path}", path=log_of(max(first.rank, 0))))
    return RankFailed(join_messages("\n", lines[:MAX_REPORT_LINES]))


def fork_server_error(status: int | None, log: Path) -> RankFailed:
    """Returns the error for a fork server that ended. `status`: its exit code, the negative number of a signal, or None
    if it is unknown. `log`: its log file."""
    said = [f"  | {line}" for line in log_tail(log, 1)]
    return RankFailed(
        join_messages(
            "\n",
            [
                _fork_server_cause(status),
                *said,
                Message("  log: {path}", path=log),
            ],
        )
    )


def _fork_server_cause(status: int | None) -> str:
    how = (
        Message("signal {status}", status=-status)
        if status is not None and status < 0
        else Message("exit status {status}", status=status)
    )
    return Message("the process that starts ranks died ({how}); every rank ended with it", how=how)


def fork_server_exit(status: int | None, log: Path) -> RankExit:
    """Returns the end of a fork server as the exit of rank -1, which denotes all ranks. Arguments as for
    `fork_server_error`. An end by a signal may be transient, so two such ends do not count as the same error."""
    return RankExit(-1, time.monotonic(), 1 if status is None else status, words=_fork_server_cause(status))


def fork_server_hang(at: float, seconds: float) -> RankExit:
    """Returns the failure of a fork server that was not ready within `seconds`, as the exit of rank -1. It may be
    transient, so two of them do not count as the same error."""
    words = Message("the process that starts ranks was not ready within {seconds:seconds}", seconds=seconds)
    return RankExit(-1, at, -signal.SIGKILL, words=words)


def local_failure(error: Exception, rank: int, world: int) -> MeshwrightError:
    """Returns the error that a rank without a supervisor raises for `error`. The report covers only this rank."""
    found = translate_system_error(error, ())
    if isinstance(found, MeshwrightError):
        return found
    mine = RankExit(rank, 0.0, 1, type(error).__name__, str(error))
    if mine.innocent:
        return RankFailed(
            Message("rank {rank} of {world} lost the connection because of another rank", rank=rank, world=world)
        )
    return RankFailed(
        Message(
            "rank {rank} of {world} on {host}: {cause}",
            rank=rank,
            world=world,
            host=socket.gethostname(),
            cause=failure_cause(mine),
        )
    )
