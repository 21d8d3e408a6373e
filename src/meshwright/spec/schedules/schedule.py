"""Defines `Schedule`, the class with all properties of a pipeline schedule that the planner, the runtime and the
reports need.

A schedule is one file of this folder with one subclass of `Schedule`. `find_schedule` finds it by name; there is no
list of schedules. Other files do not compare names of schedules; they use the properties of this class.

Symbols: p pipeline ranks, v virtual stages on each rank, m micro-batches, rank r. f is the time of forward in seconds,
b that of the gradients of inputs, and w that of the gradients of weights, each for one micro-batch on all stages of a
rank. Formulas accept numbers and NumPy arrays, although this package does not import NumPy.

>>> schedule_names()[:2]
('1f1b', 'gpipe')
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action


class InFlight(NamedTuple):
    """The activations that a rank stores just before one of its backward passes.

    `turn` is the index, among the stages of the rank, of the stage that runs backward. `alive` counts, for each stage
    of the rank, the micro-batches whose B has not run. `deferred` counts the micro-batches of the running stage whose B
    has run and whose W has not.
    """

    turn: int
    alive: tuple[Any, ...]
    deferred: Any = 0


class Schedule:
    """The rules of a pipeline schedule. A subclass overrides the properties that differ from these defaults.

    `actions` is the order that a plan lists; only the custom schedule reads it.
    """

    name: ClassVar[str]
    """The value of `Plan.schedule`."""
    preference: ClassVar[int]
    """The position among all schedules, from simple to complex. If plans are equally fast, the search prefers the
    simpler schedule."""
    listed: ClassVar[bool] = False
    """Whether a plan lists the order in `Plan.actions`. The search offers only schedules that are not listed."""
    stages_per_rank: ClassVar[int] = 1
    """The number of virtual stages of each rank; the minimum number if `any_stages_per_rank` is set."""
    any_stages_per_rank: ClassVar[bool] = False
    """Whether a plan chooses the number of virtual stages."""
    splits_backward: ClassVar[bool] = False
    """Whether backward is, or may be, two actions: B for the gradients of inputs, W for the gradients of weights."""
    defers_weights: ClassVar[bool] = False
    """Whether some W are still deferred at the memory peak. It is False if each W directly follows its B at the
    peak."""
    in_rounds: ClassVar[bool] = False
    """Whether micro-batches run in rounds of p. Their number is then a multiple of p, and every round after the first
    has the same activations in flight."""
    heterogeneous: ClassVar[bool] = False
    """Whether pipeline ranks may be on unequal groups of devices (`Plan.placement`)."""

    def __init__(self, actions: tuple[str, ...] = ()) -> None:
        self.actions = actions

    # --- stages

    @property
    def v_shape(self) -> bool:
        """Returns whether rank r has the stages r and 2 p - 1 - r. Otherwise it has the stages r, r + p, ..."""
        return False

    def splits_stage(self, stage: int) -> bool:
        """Returns whether the backward of `stage` is two actions."""
        return self.splits_backward

    # --- micro-batches

    @property
    def ordered_micro_batches(self) -> int:
        """Returns the only number of micro-batches that the schedule accepts, or 0 if it accepts several numbers."""
        return 0

    def min_micro_batches(self, pp: int) -> int:
        """Returns the minimum number of micro-batches on `pp` ranks."""
        return 1

    def multiple_of(self, pp: int) -> int:
        """Returns a number that must divide the number of micro-batches."""
        return pp if self.in_rounds else 1

    def accepts(self, pp: int, micro_batches: Any) -> Any:
        """Returns whether the schedule accepts `micro_batches` micro-batches. The number may be an array."""
        accepted = (micro_batches >= self.min_micro_batches(pp)) & (micro_batches % self.multiple_of(pp) == 0)
        ordered = self.ordered_micro_batches
        return accepted & (micro_batches == ordered) if ordered else accepted

    @property
    def accepts_any(self) -> bool:
        """Returns whether the schedule accepts any number of micro-batches on any number of ranks."""
        return self.multiple_of(2) == self.min_micro_batches(2) == 1 and not self.ordered_micro_batches

    # --- order

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank.

        Raises: InputError if the schedule does not accept the number of micro-batches.
        """
        raise NotImplementedError

    def orders(self, pp: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
        """Returns the actions of every pipeline rank.

        Raises: InputError if the schedule does not accept the numbers of ranks, stages and micro-batches.
        """
        if min(pp, virtual_stages, micro_batches) < 1:
            raise InputError(
                Message(
                    "a pipeline needs at least 1 rank, stage and micro-batch, got pp({pp}), {virtual_stages} and "
                    "{micro_batches}",
                    pp=pp,
                    virtual_stages=virtual_stages,
                    micro_batches=micro_batches,
                )
            )
        if not self.any_stages_per_rank and virtual_stages != self.stages_per_rank:
            own = self.stages_per_rank
            remedy = Message("use schedule interleaved") if own == 1 else Message("use that many")
            raise InputError(
                Message(
                    "schedule {name} needs {own:count stage} per pipeline rank, the plan has {virtual_stages}; "
                    "{remedy}",
                    name=self.name,
                    own=own,
                    virtual_stages=virtual_stages,
                    remedy=remedy,
                )
            )
        return [self.order(rank, pp, virtual_stages, micro_batches) for rank in range(pp)]

    # --- costs

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns the seconds that each rank except the slowest adds to the bubble of the step, if its times are f, b
        and w."""
        return (f + b + w) / virtual_stages

    def drain_bubble(self, f: Any, b: Any, w: Any) -> tuple[Any, Any] | None:
        """Returns another lower bound of the bubble, or None if there is only the bound of `bubble`. It is the sum of
        two parts: the seconds that each rank except the slowest adds, and the seconds that the slowest rank adds."""
        return None

    def idle_micro_batches(self, virtual_stages: int) -> float:
        """Returns the idle time that the order itself adds to the bubble. The unit is the time of one micro-batch on
        the slowest rank."""
        return 0.0

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the points of a step at which the saved activations of a rank can be at their peak.

        `micro_batches` is an array, except for a schedule with `in_rounds`, which gets one number.
        """
        raise NotImplementedError

    def in_flight_limit(self, pp: int) -> int | None:
        """Returns the maximum number of micro-batches in flight on a rank; None if a rank can have all micro-batches in
        flight."""
        return 2 * pp

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns the number of consecutive messages on the critical path of a step."""
        return 2 * (pp * virtual_stages - 1)

    # --- plan names

    def name_part(self, virtual_stages: int) -> str:
        """Returns the schedule's part of the name of a plan."""
        return self.name

    def parse_name_part(self, part: str) -> dict[str, Any] | None:
        """Returns the fields of the plan that `part` of a name sets, or None if `part` does not name this schedule."""
        return {"schedule": self.name, "virtual_stages": self.stages_per_rank} if part == self.name else None


def elementwise_max(one: Any, other: Any) -> Any:
    """Returns the larger of two values, element by element if one of them is an array (array API standard 2022.12).

    >>> elementwise_max(2, 3)
    3
    """
    arrays = _array_namespace(one, other)
    return max(one, other) if arrays is None else arrays.maximum(one, other)


def elementwise_min(one: Any, other: Any) -> Any:
    """Returns the smaller of two values, element by element if one of them is an array."""
    arrays = _array_namespace(one, other)
    return min(one, other) if arrays is None else arrays.minimum(one, other)


def _array_namespace(*values: Any) -> Any:
    return next((value.__array_namespace__() for value in values if hasattr(value, "__array_namespace__")), None)


def stage_to_rank(stage: Any, pp: int, v_shape: bool) -> Any:
    """Returns the pipeline rank of a stage. Stages are assigned to ranks in a loop, or as a V (`v_shape`). `stage` may
    be an array.

    >>> [stage_to_rank(stage, 4, False) for stage in range(8)], [stage_to_rank(stage, 4, True) for stage in range(8)]
    ([0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0])
    """
    return (2 * pp - 1 - abs(2 * stage - 2 * pp + 1)) // 2 if v_shape else stage % pp


@cache
def _schedule_classes() -> dict[str, type[Schedule]]:
    """Imports every file of the folder. Returns the schedules by name, sorted by preference."""
    for module in pkgutil.iter_modules(sys.modules[__package__].__path__):
        import_module(f"{__package__}.{module.name}")
    found = sorted(Schedule.__subclasses__(), key=lambda kind: kind.preference)
    return {kind.name: kind for kind in found}


def schedule_names() -> tuple[str, ...]:
    """Returns the names of all schedules, sorted by preference."""
    return tuple(_schedule_classes())


def offered_schedules() -> tuple[Schedule, ...]:
    """Returns the schedules that the search offers, sorted by preference."""
    return tuple(kind() for kind in _schedule_classes().values() if not kind.listed)


@lru_cache
def find_schedule(name: str, actions: tuple[str, ...] = ()) -> Schedule:
    """Returns the schedule called `name`. `actions` is the order that a plan lists.

    Raises: InputError if no schedule has this name.
    """
    kind = _schedule_classes().get(name)
    if kind is None:
        known = schedule_names()
        raise InputError(
            Message(
                "schedule {name!r} is not one of {known}{hint}",
                name=name,
                known=", ".join(known),
                hint=did_you_mean(str(name), known),
            )
        )
    return kind(actions)


def schedule_orders(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, actions: Sequence[str] = ()
) -> list[list[Action]]:
    """Returns the list of actions of each pipeline rank.

    Raises: InputError if no schedule has this name, or if it does not accept the numbers.
    """
    return find_schedule(schedule, tuple(actions)).orders(pp, virtual_stages, micro_batches)
