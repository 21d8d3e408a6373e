"""Decides whether a failed run is retried, and contains the settings of fault handling (`FaultPolicy`).

[Note: giving up] The same error twice in the same step is deterministic and ends the run. Two ranks that ended without
a message do not count as the same error. For other errors, more than `retries` failures in a row without a completed
step between them end the run. From the second failure on, the pause before a retry doubles each time, with jitter.

[Note: lower memory] OOM twice in the same step also counts as deterministic, even if the messages differ. Then the
supervisor requests a plan that takes less memory. It repeats this after each further OOM until no such plan is left.

[Note: lemons] If a rank was the culprit of the last BAD_RANK_FAULTS faults, the supervisor assumes a hardware defect
(memory, CPU core or device) that a restart does not repair. If the run may have fewer ranks, it continues without this
rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.core.messages import Message
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.devices import ExclusionPolicy
from meshwright.elastic.failure import RankExit, failure_cause, is_oom
from meshwright.elastic.hang_detector import CPU_LIMITS, HangLimits
from meshwright.elastic.snapshot_inventory import AdoptionPolicy

RETRY_PAUSE_SECONDS = 0.1
"""The pause in seconds after the second failure in a row without a completed step."""

BAD_RANK_FAULTS = 3


@dataclass
class RestartPolicy:
    """Counts failures. `in_row` is the number of failures since the last completed step."""

    retries: int
    in_row: int = 0
    hungry: bool = False
    """Whether the last failure was OOM."""
    verdict: str = ""
    """Why the run is not retried any more; '' while it is."""
    _step: int = -1
    _cause: str = ""
    _rank: int = -1
    _culprits: list[int] = field(default_factory=list)

    def is_hungry(self, failure: RankExit) -> bool:
        """Returns whether the failure was an OOM, and stores the answer in `hungry`."""
        self.hungry = is_oom(failure)
        return self.hungry

    def count(self, failure: RankExit, step: int, starved: bool = False) -> str:
        """Records `failure`, which occurred after step `step` had ended. Returns why a retry is hopeless, or '' if it
        is not. `starved`: whether lower-memory plans are exhausted."""
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
        """The rank that was the culprit of each of the last BAD_RANK_FAULTS faults, or None."""
        last = self._culprits[-BAD_RANK_FAULTS:]
        return last[0] if len(last) == BAD_RANK_FAULTS and len(set(last)) == 1 and last[0] >= 0 else None

    def forget_culprits(self) -> None:
        """Forgets the culprits, because ranks are renumbered."""
        self._culprits.clear()

    def pause(self) -> float:
        """Returns the seconds to wait before the next attempt."""
        return RETRY_PAUSE_SECONDS * 2.0 ** (self.in_row - 2) * random.uniform(0.5, 1.5) if self.in_row > 1 else 0.0

    def rest(self, part: Callable[[str, float], None]) -> None:
        """Sleeps for `pause` seconds and reports the duration to `part`."""
        if pause := self.pause():
            time.sleep(pause)
            part("pause", pause)


@dataclass(frozen=True)
class FaultPolicy:
    """How faults of a run are handled.

    `retries`: the number of failures in a row that are retried; 0: none. `hang_timeout`: minimum seconds of silence
    after which a rank counts as hung; 0: never. `replan` takes a number of ranks and returns the job for at most that
    many; without it the world size is fixed. `min_ranks`: the minimum number of ranks after a permanent loss; 0: all.
    """

    retries: int = 0
    hang_timeout: float = 0.0
    replan: Callable[[int], RankJob] | None = None
    min_ranks: int = 0
    leaner: Callable[[RankJob], RankJob] | None = None
    """Returns the same job under a plan that takes less memory. Raises: NothingFits if there is no such plan."""
    instead: Callable[[RankJob], str] = lambda work: ""
    """Returns a text about a plan that takes less memory, for the report of an OOM."""
    rejoin_timeout: float = 0.0
    """Seconds within which a lost node may return."""
    leaving: ExclusionPolicy | None = None
    """The policy for the exclusion of slow devices; None: none is excluded."""
    full: int = 0
    """The planned number of ranks if the run begins with fewer ranks, else 0."""
    terms: HangLimits = CPU_LIMITS
    """The limits after which a rank counts as hung, by the kind of device."""
    hold: AdoptionPolicy | None = None
    """How snapshots outlive this process, if all ranks are on this machine. None: snapshots end with this process."""
    follows: bool = False
    """Whether ranks have trained under a previous leader. If so, the run recovers even from a fault before the first
    step under this leader."""
