"""Decides whether the supervisor retries a failed run, and defines the settings of fault handling (`FaultPolicy`).

[Note: giving up] An error that occurs twice in one step counts as deterministic and ends the run. Two exits without a
message count as the same error only if they are of one rank. Two exits by a signal, which may be transient, count as
the same error only if both are OOM kills. Other errors end the run if more than `retries` failures occur in a row
without a completed step between them. From the second failure on, the pause before a retry doubles each time, with
random variation.

[Note: lower memory] Two OOM errors in one step count as equal, even if their messages differ. Then the supervisor
requests a plan that takes less memory. It does so after each further OOM until no such plan is left.

[Note: lemons] If one rank caused the last BAD_RANK_FAULTS faults, the supervisor assumes that its memory, CPU core or
device is defective. A restart would not repair this. If the run may have fewer ranks, it continues without the rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.core.messages import Message
from meshwright.core.retry import ResultT, retry_os_error
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.devices import ExclusionPolicy
from meshwright.elastic.failure import RankExit, failure_cause, is_oom
from meshwright.elastic.hang_detector import CPU_LIMITS, HangLimits
from meshwright.elastic.snapshot_inventory import AdoptionPolicy

RETRY_PAUSE_SECONDS = 0.1
"""The pause before the retry after the second failure in a row without a completed step."""

BAD_RANK_FAULTS = 3


@dataclass
class RestartPolicy:
    """Counts failures and decides on retries. `retries`: as in FaultPolicy. `in_row`: the number of failures since the
    last completed step."""

    retries: int
    in_row: int = 0
    hungry: bool = False
    """Whether the last failure was an OOM."""
    verdict: str = ""
    """Why the run is not retried any more, or ''. The supervisor sets it."""
    _step: int = -1
    _cause: str = ""
    _rank: int = -1
    _culprits: list[int] = field(default_factory=list)

    def is_hungry(self, failure: RankExit) -> bool:
        """Returns whether the failure was an OOM. Sets `hungry` to the result."""
        self.hungry = is_oom(failure)
        return self.hungry

    def count(self, failure: RankExit, step: int, starved: bool = False) -> str:
        """Records `failure`, the culprit's exit. `step`: the last completed step. `starved`: whether the failure is an
        OOM. Returns why the run must not be retried, or '' ([Note: giving up])."""
        why = Message("out of memory") if starved else failure_cause(failure)
        is_sent = bool(failure.error or failure.message or failure.words) or failure.rank == self._rank
        same = step == self._step and why == self._cause and (starved or (failure.status >= 0 and is_sent))
        self.in_row = self.in_row + 1 if step == self._step else 1
        self._step, self._cause, self._rank = step, why, failure.rank
        self._culprits.append(failure.rank)
        if same or self.in_row > self.retries:
            again = (
                Message("the same error in the same step again")
                if same
                else Message("{in_row} failures without a step between them", in_row=self.in_row)
            )
            return Message(
                "gave up after {again}: another restart would not help; the last checkpoint is kept", again=again
            )
        return ""

    @property
    def lemon(self) -> int | None:
        """Returns the rank that caused each of the last BAD_RANK_FAULTS faults, or None."""
        last = self._culprits[-BAD_RANK_FAULTS:]
        return last[0] if len(last) == BAD_RANK_FAULTS and len(set(last)) == 1 and last[0] >= 0 else None

    def forget_culprits(self) -> None:
        """Forgets the culprits. The supervisor calls it when ranks are numbered anew."""
        self._culprits.clear()

    def pause(self) -> float:
        """Returns the seconds to wait before the next generation: 0 after the first failure in a row."""
        return RETRY_PAUSE_SECONDS * 2.0 ** (self.in_row - 2) * random.uniform(0.5, 1.5) if self.in_row > 1 else 0.0

    def rest(self, part: Callable[[str, float], None]) -> None:
        """Sleeps for `pause` seconds. Calls `part` with "pause" and the duration (`EventLog.part`)."""
        if pause := self.pause():
            time.sleep(pause)
            part("pause", pause)


def call_with_retries(do: Callable[[], ResultT], retries: int, note: Callable[[str], None]) -> ResultT:
    """Returns `do()`. After an OSError, `note` receives a line, and `do` is called again, up to `retries` times. The
    first pause takes RETRY_PAUSE_SECONDS, and each further one twice as long."""
    pauses = (RETRY_PAUSE_SECONDS * 2.0**number for number in range(retries))
    return retry_os_error(
        do, pauses, lambda error: note(Message("the supervisor failed: {error}; it tries again", error=error))
    )


@dataclass(frozen=True)
class FaultPolicy:
    """The settings of fault handling of a run.

    `retries`: the number of failures in a row that are retried; 0 means none. `hang_timeout`: a rank counts as hung
    after this number of seconds of silence at the earliest; 0 means never. `replan` returns the job for at most the
    given number of ranks; without it, the world size is fixed. `min_ranks`: the minimum number of ranks after the
    loss of a node or of a rank that keeps failing. With 0, the run goes on with the devices of the remaining nodes, and
    keeps a rank that fails repeatedly.
    """

    retries: int = 0
    hang_timeout: float = 0.0
    replan: Callable[[int], RankJob] | None = None
    min_ranks: int = 0
    leaner: Callable[[RankJob], RankJob] | None = None
    """Returns the given job under a plan that takes less memory. Raises NothingFits if there is no such plan."""
    instead: Callable[[RankJob], str] = lambda work: ""
    """Returns a line about a plan that takes less memory, for the report of an OOM."""
    rejoin_timeout: float = 0.0
    """The seconds for which the run waits for a lost node to return."""
    leaving: ExclusionPolicy | None = None
    """The settings for the exclusion of slow devices, or None if they are not excluded."""
    full: int = 0
    """The planned number of ranks if the run begins with fewer ranks, else 0."""
    terms: HangLimits = CPU_LIMITS
    """The limits after which a rank on this type of device counts as hung."""
    hold: AdoptionPolicy | None = None
    """How the in-memory snapshots outlive this process. None: they are lost with this process."""
    follows: bool = False
    """Whether ranks have trained under an earlier leader. Then the run recovers even from a fault before the first step
    under this leader."""
