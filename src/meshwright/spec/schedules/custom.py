"""Defines the custom schedule: the plan itself lists the actions of every pipeline rank (`Plan.actions`).

All other properties are computed from the list: which stages split their backward, whether the stages form a V, the
number of micro-batches, and the activations and idle time of each rank.

>>> CustomSchedule(("0F0 0F1 0B0 0B1",)).ordered_micro_batches
2
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from meshwright.spec.schedules.action import Action, ActionKind, parse_action
from meshwright.spec.schedules.schedule import InFlight, Schedule
from meshwright.spec.schedules.simulate import simulate_orders
from meshwright.spec.schedules.text import parse_orders

CUSTOM_SCHEDULE = "actions"
CUSTOM_NAME_PREFIX = "csv-"
"""The prefix of the schedule's part in the name of a plan. A digest of the actions follows the prefix."""


class CustomSchedule(Schedule):
    """A schedule whose order is a list of actions for each pipeline rank, such as '0F0 0F1 0B0 0B1'."""

    name = CUSTOM_SCHEDULE
    preference = 6
    listed = True
    any_stages_per_rank = True
    splits_backward = True

    @property
    def v_shape(self) -> bool:
        """Whether the stages form a V. They do if there are p > 1 pipeline ranks and the last rank runs stage p."""
        pp = len(self.actions)
        return pp > 1 and re.search(rf"(^|\s){pp}[FBW]", self.actions[-1]) is not None

    def splits_stage(self, stage: int) -> bool:
        """Returns whether the list has W of `stage`."""
        return any(re.search(rf"(^|\s){stage}W", line) for line in self.actions)

    @property
    def ordered_micro_batches(self) -> int:
        """The number of micro-batches in the list."""
        return 1 + max(
            (int(re.sub(r".*[FBW]", "", action)) for line in self.actions for action in line.split()), default=-1
        )

    def orders(self, pp: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
        """Returns the listed actions.

        Raises: InputError with the first wrong action.
        """
        return parse_orders(self.actions, pp * virtual_stages, micro_batches)

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns 0, because `idle_micro_batches` accounts for the whole bubble."""
        return 0.0

    def idle_micro_batches(self, virtual_stages: int) -> float:
        """Returns the idle time of a simulated step. All stages take the same time, and F, B and W take equal times.

        >>> CustomSchedule(("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")).idle_micro_batches(1)
        1.0
        """
        micro_batches, pp = self.ordered_micro_batches, len(self.actions)
        table = self.orders(pp, virtual_stages, micro_batches)
        split = {action.stage for row in table for action in row if action.kind is ActionKind.W}
        thirds = [1.0 / (3 * virtual_stages)] * (pp * virtual_stages)
        backward = [third if stage in split else 2 * third for stage, third in enumerate(thirds)]
        return round(simulate_orders(table, thirds, backward, 0.0, thirds).makespan, 9) - micro_batches

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the actions of the rank's list before which memory can be at its peak."""
        return listed_in_flight(self.actions[rank])

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 4 (p - 1) messages for a V, otherwise 2 (p v - 1)."""
        return 4 * (pp - 1) if self.v_shape else 2 * (pp * virtual_stages - 1)

    def name_part(self, virtual_stages: int) -> str:
        """Returns the prefix and a digest of the actions."""
        return CUSTOM_NAME_PREFIX + hashlib.sha256("\n".join(self.actions).encode()).hexdigest()[:8]

    def parse_name_part(self, part: str) -> dict[str, Any] | None:
        """Returns None, because a name cannot list the actions."""
        return None


def listed_in_flight(line: str) -> list[InFlight]:
    """Returns the possible memory peaks of a rank's list, each just before a backward.

    >>> listed_in_flight("0F0 0F1 0B0 0W0 0B1 0W1")
    [InFlight(turn=0, alive=(2,), deferred=0)]
    """
    order = [parse_action(word) for word in line.split()]
    stages = sorted({action.stage for action in order})
    split = {action.stage for action in order if action.kind is ActionKind.W}
    alive = dict.fromkeys(stages, 0)
    moments: set[tuple[int, tuple[int, ...]]] = set()
    for kind, stage, _ in order:
        alive[stage] += kind is ActionKind.F
        if kind is ActionKind.B:
            moments.add((stages.index(stage), tuple(alive.values())))
        alive[stage] -= kind is (ActionKind.W if stage in split else ActionKind.B)
    return [InFlight(*moment) for moment in sorted(moments) if not any(_dominates(other, moment) for other in moments)]


def _dominates(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    return (
        one != other
        and one[0] == other[0]
        and all(mine >= theirs for mine, theirs in zip(one[1], other[1], strict=True))
    )
