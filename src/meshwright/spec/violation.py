"""Describes a broken constraint of a plan."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """The reason why a plan cannot run. `reason` groups plans; `message` is the line for this plan."""

    reason: str
    message: str
