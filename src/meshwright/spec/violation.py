"""Describes a broken rule of a plan, which the checks of constraints.py and workload_constraints.py yield."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """The reason why a plan cannot run. `reason` is identical for all plans that break the rule. `message` has the
    numbers of this plan."""

    reason: str
    message: str
