"""From the name of a schedule to the actions of every pipeline rank. The names are the values of `spec.plan.Schedule`.

Stages lie on ranks as `spec.plan.rank_of` says: stage s on rank s % p, but for those that are laid as a V. `actions` is
the one schedule whose
order the plan brings along; it is checked here, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.errors import InputError, did_you_mean
from meshwright.spec.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from meshwright.spec.schedules.action import Action
from meshwright.spec.schedules.text import parse_orders

_SCHEDULES = (
    ("gpipe", gpipe.order, 1),
    ("1f1b", one_f_one_b.order, 1),
    ("interleaved", interleaved.order, 0),
    ("zbh1", zb_h1.order, 1),
    ("zbv", zb_v.order, 2),
    ("dualpipev", dualpipe_v.order, 2),
)
"""Name, order, stages that a rank holds; 0: as many as one likes."""


CUSTOM_SCHEDULE = "actions"


def schedule_names() -> tuple[str, ...]:
    """The schedules that have an order of their own."""
    return tuple(name for name, _, _ in _SCHEDULES)


def schedule_orders(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, actions: Sequence[str] = ()
) -> list[list[Action]]:
    """One list of actions for each pipeline rank; those of schedule `actions` are given. Raises InputError for what
    cannot be ordered."""
    if schedule == CUSTOM_SCHEDULE:
        return parse_orders(actions, pp * virtual_stages, micro_batches)
    order, held = next(((order, held) for name, order, held in _SCHEDULES if name == schedule), (None, 0))
    if order is None:
        raise InputError(
            f"schedule {schedule!r} is not one of {', '.join(schedule_names())}{did_you_mean(str(schedule), schedule_names())}"
        )
    if min(pp, virtual_stages, micro_batches) < 1:
        raise InputError(
            f"a pipeline needs at least 1 rank, stage and micro-batch, got pp({pp}), {virtual_stages} and {micro_batches}"
        )
    if held and virtual_stages != held:
        ways = "use schedule interleaved" if held == 1 else "use that many"
        raise InputError(
            f"schedule {schedule} holds {held} stage{'s' * (held > 1)} a rank, the plan has {virtual_stages}; {ways}"
        )
    return [order(rank, pp, virtual_stages, micro_batches) for rank in range(pp)]
