"""Describes a broken constraint of a plan."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """The reason why a plan cannot run. `reason` is the same for all plans that break a rule. `message` has the numbers
    of one plan."""

    reason: str
    message: str
