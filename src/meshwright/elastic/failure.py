"""Which rank failed first, and what to say of it in at most 12 lines: cause and rank before anything else.

Rule: when one rank fails the others fail too, of lost connections. Those are innocent: they are counted, not shown. The culprit is the
first rank that ended by a signal that we did not send, or that raised something else than a lost connection; only when there is none,
the first that lost a connection.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import InputError, MeshwrightError, of_the_system
from meshwright.base.limits import memory_limit
from meshwright.base.units import show_bytes

MOST_LINES = 12
LAST_BYTES = 1 << 18
"""Of a log, in which a stack is looked for."""
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""Signals at which Python writes a stack."""
WANT = "by the system for want of memory"
_LOST = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|gloo/transport|peer closed|socket (timeout|closed)|failed to recv"
    r"|ncclRemoteError|remote process exited|Stop_waiting|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended. `status` is negative for a signal. `at` is in seconds of the supervisor's clock.

    `known`: the error is one of ours, whose message says it all. `words`: what the supervisor saw before it ended the rank.
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
    """How often the system killed for want of memory, in the control group of this rank, between the start of its generation and its end."""
    raised_by: int | None = None
    """The rank that raised it first, where this rank only waited for that one."""

    @property
    def innocent(self) -> bool:
        """It lost its connection to another rank, or ended because that one raised."""
        if self.raised_by is not None:
            return True
        return not (self.known or self.words) and self.status >= 0 and bool(_LOST.search(self.message))


class RankFailed(MeshwrightError):
    """A rank failed. The message is the report."""


def starved(failure: Failure) -> bool:
    """Whether it wanted memory: it said so itself, or it was killed and the system killed for that since its generation began.

    >>> starved(Failure(0, 0.0, 1, "OutOfMemory", "rank 0 is out of memory in step 2", known=True))
    True
    """
    if failure.error in ("OutOfMemory", "OutOfMemoryError", "MemoryError"):
        return True
    killed = failure.status == -signal.SIGKILL
    return killed and (WANT in failure.words if failure.words else failure.kills > 0)


def culprit(failures: Sequence[Failure]) -> Failure:
    """
    >>> culprit([Failure(0, 1.0, 1, "RuntimeError", "Connection reset by peer"), Failure(2, 1.1, -9)]).rank
    2
    """
    guilty = [failure for failure in failures if not failure.innocent]
    return min(guilty or failures, key=lambda failure: failure.at)


def cause(failure: Failure) -> str:
    """What happened to it, in words.

    >>> cause(Failure(1, 0.0, -9))
    "killed by SIGKILL: by someone's kill -9, or by the system for want of memory"
    """
    if failure.words:
        return failure.words
    if failure.status < 0:
        name = signal.Signals(-failure.status).name if -failure.status in list(signal.Signals) else f"signal {-failure.status}"
        hint = {
            "SIGKILL": _killed(failure.kills, memory_limit()),
            "SIGABRT": ": a library gave up (gloo does so when ranks disagree on a size)",
            "SIGSEGV": ": a native library read or wrote where it must not (under z3 such are weights read outside of the module that holds them)",
            "SIGBUS": ": a mapped file was cut, its disk (--offload-to) cannot be read any more, or that of /dev/shm is full",
        }.get(name, "")
        return f"killed by {name}{hint}"
    if failure.error:
        first = failure.message.strip().partition("\n")[0]
        return f"{failure.error}: {first}" if first != failure.error else failure.error
    return f"ended with exit status {failure.status} and no message"


def _killed(kills: int, limit: float) -> str:
    """
    >>> _killed(2, 2.0**30)
    ': by the system for want of memory, of which its control group has 1.00 GiB (2 killed so far); rc-full and off-optimizer-disk take less of it'
    """
    if not kills:
        return ": by someone's kill -9, or by the system for want of memory"
    has = f", of which its control group has {show_bytes(limit)}" if limit != float("inf") else ""
    return f": {WANT}{has} ({kills} killed so far); rc-full and off-optimizer-disk take less of it"


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log, without blank lines."""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return [line.rstrip()[:200] for line in deque((line for line in lines if line.strip()), count)]
    except OSError:
        return []


def crashed_at(log: Path) -> str:
    """Where a rank was when a signal of its own doing ended it: of the last stack that Python's faulthandler wrote (train/rank.py) the innermost
    frame that is not torch's; empty where there is none."""
    try:
        with log.open("rb") as lines:
            lines.seek(max(log.stat().st_size - LAST_BYTES, 0))
            said = lines.read().decode(errors="replace")
    except OSError:
        return ""
    stack = said.rpartition("Fatal Python error: ")[2].partition("Current thread ")[2].partition("\n\n")[0]
    frames = [frame for frame in re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE) if "/torch/" not in frame[0]]
    return "{}:{} in {}".format(*frames[0]) if frames else ""


def verdict(failures: Sequence[Failure], world: int, log_of: Callable[[int], Path], why: str = "", instead: str = "") -> MeshwrightError:
    """The error to raise. One of ours keeps its words and its exit code. `why`: what is to be said beside it; `instead`: which plan needs less of what is wanting."""
    first = culprit(failures)
    if first.known:
        words = "; ".join(filter(None, (first.message, instead)))
        error = InputError(words) if first.status == InputError.exit_code else MeshwrightError(words)
        error.exit_code = first.status
        return error
    who = f"rank {first.rank} of {world}" if first.rank >= 0 else f"all {world} ranks"
    lines = [f"{who} on {socket.gethostname()}: {cause(first)}"]
    lines += [f"  {each}" for each in (why, instead) if each]
    place = first.place or (crashed_at(log_of(first.rank)) if first.rank >= 0 and -first.status in CRASHES else "")
    if place:
        lines.append(f"  at {place}")
    elif first.rank >= 0 and (first.status < 0 or not first.error):
        lines += [f"  | {line}" for line in last_lines(log_of(first.rank), 3)]
    others = [failure for failure in failures if failure is not first]
    for count, what in (
        (sum(not other.innocent for other in others), "failed too"),
        (sum(other.innocent for other in others), "lost the connection because of it"),
    ):
        if count:
            lines.append(f"  {count} other rank{'s' if count > 1 else ''} {what}")
    lines.append(f"  log: {log_of(max(first.rank, 0))}")
    return RankFailed("\n".join(lines[:MOST_LINES]))


def orphaned(status: int | None, log: Path) -> RankFailed:
    """The process that starts ranks ended with `status`."""
    how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    said = [f"  | {line}" for line in last_lines(log, 1)]
    return RankFailed("\n".join([f"the process that starts ranks died ({how}); every rank ended with it", *said, f"  log: {log}"]))


def orphan(status: int | None, log: Path) -> Failure:
    """The same as a failure of all ranks. One that a signal ended is no deterministic error, so that it may be tried again in the same step."""
    words = str(orphaned(status, log)).partition("\n")[0]
    return Failure(-1, time.monotonic(), 1 if status is None else status, words=words)


def failed_here(error: Exception, rank: int, world: int) -> MeshwrightError:
    """The same words for a rank that has no supervisor: it can only speak of itself."""
    found = of_the_system(error, ())
    if isinstance(found, MeshwrightError):
        return found
    mine = Failure(rank, 0.0, 1, type(error).__name__, str(error))
    if mine.innocent:
        return RankFailed(f"rank {rank} of {world} lost the connection because of another rank")
    return RankFailed(f"rank {rank} of {world} on {socket.gethostname()}: {cause(mine)}")
