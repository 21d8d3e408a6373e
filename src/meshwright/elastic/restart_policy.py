"""Whether a run that has failed is tried again: what has failed so far, and what it says.

[Note: giving up] The same error in the same step twice is deterministic: no more tries; of two ranks that ended without
a word nobody knows whether it is. Otherwise `retries` failures in a row without a step
between them end the run; from the second on each try waits twice as long as the one before, with jitter.

[Note: leaner] Want of memory twice in the same step is no chance either, however the words differ: a plan that takes
less may do it, so the
supervisor asks for one, again and again, until there is none.

[Note: lemons] A rank that was the culprit of LEMON faults running has something wrong with it that starting again does
not mend: its memory,
its core, its device. Where a run may go on with fewer ranks it goes on without one.

What the supervisor does for a run before it gives the run up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.elastic.attempt import RankJob
from meshwright.elastic.device_exclusion import ExclusionPolicy
from meshwright.elastic.failure import RankExit, failure_cause, is_oom
from meshwright.elastic.hang_detector import CPU_LIMITS, HangLimits
from meshwright.elastic.snapshot_adoption import AdoptionPolicy

RETRY_PAUSE_SECONDS = 0.1
"""Seconds before the second try without a step between."""

BAD_RANK_FAULTS = 3


@dataclass
class RestartPolicy:
    """`in_row`: failures since the last step that ended."""

    retries: int
    in_row: int = 0
    hungry: bool = False
    """Whether the last failure was for want of memory."""
    _step: int = -1
    _cause: str = ""
    _rank: int = -1
    _culprits: list[int] = field(default_factory=list)

    def is_hungry(self, failure: RankExit) -> bool:
        """Whether it failed for want of memory."""
        self.hungry = is_oom(failure)
        return self.hungry

    def count(self, failure: RankExit, step: int, starved: bool = False) -> str:
        """Takes note of `failure` after `step` had ended. Why it is hopeless, in words; empty while it is not."""
        why = "want of memory" if starved else failure_cause(failure)
        is_told = bool(failure.error or failure.message or failure.words) or failure.rank == self._rank
        same = step == self._step and why == self._cause and (starved or (failure.status >= 0 and is_told))
        self.in_row = self.in_row + 1 if step == self._step else 1
        self._step, self._cause, self._rank = step, why, failure.rank
        self._culprits.append(failure.rank)
        if same or self.in_row > self.retries:
            again = (
                "the same error in the same step again"
                if same
                else f"{self.in_row} failures without a step between them"
            )
            return f"gave up after {again}: going on would not help; the last checkpoint stays"
        return ""

    @property
    def lemon(self) -> int | None:
        """The rank that was to blame for all of the last faults."""
        last = self._culprits[-BAD_RANK_FAULTS:]
        return last[0] if len(last) == BAD_RANK_FAULTS and len(set(last)) == 1 and last[0] >= 0 else None

    def forget_culprits(self) -> None:
        """Ranks have other numbers from here on."""
        self._culprits.clear()

    def pause(self) -> float:
        """Seconds to wait before the next try."""
        return RETRY_PAUSE_SECONDS * 2.0 ** (self.in_row - 2) * random.uniform(0.5, 1.5) if self.in_row > 1 else 0.0

    def rest(self, part: Callable[[str, float], None]) -> None:
        """Waits so long; `part` gets what it took."""
        if pause := self.pause():
            time.sleep(pause)
            part("pause", pause)


@dataclass(frozen=True)
class FaultPolicy:
    """What is done for a run before it is given up. `retries` 0: nothing. `patience`: least seconds of silence after
    which a rank counts as
    hung; 0: none does. `replan`: the work of so many ranks, or of fewer; without it their number stays. `least`: as few
    as it may be when a
    rank is lost for good; 0: all."""

    retries: int = 0
    patience: float = 0.0
    replan: Callable[[int], RankJob] | None = None
    least: int = 0
    leaner: Callable[[RankJob], RankJob] | None = None
    """The same work under a plan that takes less memory. Raises NothingFits when there is none."""
    instead: Callable[[RankJob], str] = lambda work: ""
    """That plan in words, for who is told that memory was wanting."""
    rejoin: float = 0.0
    """Seconds that a lost node gets to come back."""
    leaving: ExclusionPolicy | None = None
    """How slow devices of this machine are left out; None: they are not."""
    full: int = 0
    """As many ranks as it may have again, where it begins with fewer than it was planned for; 0: those that it begins
    with."""
    terms: HangLimits = CPU_LIMITS
    """On which a rank counts as hung, by the kind of its device."""
    hold: AdoptionPolicy | None = None
    """How snapshots outlive this process, where all ranks are on this machine; None: they end with it."""
    follows: bool = False
    """Whether ranks have trained under a leader that is gone: a fault before they do so under this one is healed as any
    other."""
