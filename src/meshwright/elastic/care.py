"""What the supervisor does for a run before it gives the run up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.elastic.adoption import Hold
from meshwright.elastic.generation import Work
from meshwright.elastic.slots import Leaving
from meshwright.elastic.watch import CORES, Terms


@dataclass(frozen=True)
class Care:
    """What is done for a run before it is given up. `retries` 0: nothing. `patience`: least seconds of silence after which a rank counts as
    hung; 0: none does. `replan`: the work of so many ranks, or of fewer; without it their number stays. `least`: as few as it may be when a
    rank is lost for good; 0: all."""

    retries: int = 0
    patience: float = 0.0
    replan: Callable[[int], Work] | None = None
    least: int = 0
    leaner: Callable[[Work], Work] | None = None
    """The same work under a plan that takes less memory. Raises NothingFits when there is none."""
    instead: Callable[[Work], str] = lambda work: ""
    """That plan in words, for who is told that memory was wanting."""
    rejoin: float = 0.0
    """Seconds that a lost node gets to come back."""
    leaving: Leaving | None = None
    """How slow devices of this machine are left out; None: they are not."""
    full: int = 0
    """As many ranks as it may have again, where it begins with fewer than it was planned for; 0: those that it begins with."""
    terms: Terms = CORES
    """On which a rank counts as hung, by the kind of its device."""
    hold: Hold | None = None
    """How snapshots outlive this process, where all ranks are on this machine; None: they end with it."""
    follows: bool = False
    """Whether ranks have trained under a leader that is gone: a fault before they do so under this one is healed as any other."""
