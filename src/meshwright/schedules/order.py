"""From the name of a schedule to the actions of every pipeline rank. Names are the values of `spec.plan.Schedule`."""

from __future__ import annotations

from meshwright.base.errors import InputError, did_you_mean
from meshwright.schedules import gpipe, interleaved, one_f_one_b
from meshwright.schedules.action import Action

_FILES = (("gpipe", gpipe.order), ("1f1b", one_f_one_b.order), ("interleaved", interleaved.order))


def names() -> tuple[str, ...]:
    """The schedules that have an order."""
    return tuple(name for name, _ in _FILES)


def orders(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> list[list[Action]]:
    """One list of actions for each pipeline rank. Raises InputError for numbers that the schedule cannot order."""
    order = dict(_FILES).get(str(schedule))
    if order is None:
        raise InputError(f"schedule {schedule!r} is not one of {', '.join(names())}{did_you_mean(str(schedule), names())}")
    if min(pp, virtual_stages, micro_batches) < 1:
        raise InputError(f"a pipeline needs at least 1 rank, stage and micro-batch, got pp({pp}), {virtual_stages} and {micro_batches}")
    if virtual_stages > 1 and schedule != "interleaved":
        raise InputError(f"schedule {schedule} holds 1 stage a rank, the plan has {virtual_stages}; use schedule interleaved")
    return [order(rank, pp, virtual_stages, micro_batches) for rank in range(pp)]
