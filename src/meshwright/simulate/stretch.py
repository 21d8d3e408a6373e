"""Several steps in which ranks die: what each death costs, by what is left of its state.

A step in which a rank dies is lost, half of it on average. Then the failure is noticed, processes are built up, state is loaded (`Policy`). The
state of a rank is also on the ranks of other replicas: on all data ranks at ZeRO 0, on those of other shard groups from ZeRO 1 on. As
long as one of these lives, the same step begins again; else the run goes back to its last save and does the steps since then once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.simulate.fleet import Policy
from meshwright.simulate.lanes import place_of
from meshwright.spec.faults import Kill
from meshwright.spec.plan import Plan

LOST = 0.5
"""Of the step in which a rank dies."""


class Death(NamedTuple):
    """Ranks that die together in `step`; how many others hold what they held (the least of them), and how many whole steps are done again."""

    step: int
    ranks: tuple[int, ...]
    holders: int
    again: int


class Spent(NamedTuple):
    """Seconds; they add up to the whole."""

    progress: float
    save: float
    interrupted: float
    rework: float
    detect: float
    rebuild: float
    restore: float


@dataclass(frozen=True)
class Stretch:
    """`steps` steps with a save every `every` of them (0: none)."""

    steps: int
    every: int
    deaths: tuple[Death, ...]
    spent: Spent

    @property
    def seconds(self) -> float:
        return sum(self.spent)


def stretch(plan: Plan, step: float, kills: Sequence[Kill], steps: int, every: int, policy: Policy) -> Stretch:
    """`steps` steps of `step` seconds; 0: up to the last death. Raises InputError for a death behind the last step."""
    last = max((kill.step for kill in kills), default=1)
    steps = steps or last
    if last > steps:
        late = next(kill for kill in kills if kill.step == last)
        raise InputError(f"kill: rank {late.rank} dies in step {late.step}, but only {steps} steps are played")
    together: dict[int, set[int]] = {}
    for kill in kills:
        together.setdefault(kill.step, set()).add(kill.rank)
    deaths = []
    for at, ranks in sorted(together.items()):
        left = min(holders(plan, rank, ranks) for rank in ranks)
        deaths.append(Death(at, tuple(sorted(ranks)), left, 0 if left else (at - 1) % every if every else at - 1))
    saves = (steps - 1) // every if every else 0
    number = len(deaths)
    return Stretch(
        steps,
        every,
        tuple(deaths),
        Spent(
            progress=steps * step,
            save=saves * policy.save,
            interrupted=number * LOST * step,
            rework=sum(death.again for death in deaths) * step,
            detect=number * policy.detect,
            rebuild=number * policy.rebuild,
            restore=number * policy.restore,
        ),
    )


def holders(plan: Plan, rank: int, dead: set[int]) -> int:
    """How many living ranks hold all that `rank` holds.

    >>> from meshwright.spec.plan import parse_plan
    >>> holders(parse_plan("dp4.tp2"), 0, {0, 2}), holders(parse_plan("dp4.tp2.z1"), 0, {0}), holders(parse_plan("dp2x2.tp2.z3"), 0, {0})
    (2, 0, 1)
    """
    strides = plan.strides()
    place = place_of(plan, rank)
    axes = ("dp_replicate",) if plan.zero else ("dp_replicate", "cp")
    alike = [rank]
    for axis in axes:
        alike = [one + (at - getattr(place, axis)) * strides[axis] for one in alike for at in range(getattr(plan, axis))]
    return len(set(alike) - dead)
