"""Finds the schedules of this folder by name. There is no list: a file that defines a subclass of `Schedule` adds one.

>>> schedule_names()
('1f1b', 'gpipe', 'interleaved', 'zbh1', 'zbv', 'dualpipev', 'actions')
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action
from meshwright.spec.schedules.schedule import Schedule


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

    Raises: InputError if the schedule does not accept the numbers.
    """
    return find_schedule(schedule, tuple(actions)).orders(pp, virtual_stages, micro_batches)
