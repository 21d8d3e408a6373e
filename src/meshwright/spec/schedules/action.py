"""Defines the actions of a pipeline rank: forward (F) or backward (B, W) of one micro-batch on one stage.

If a stage has no W, B is its whole backward. If it has W, B computes the gradient of the stage's input and W the
gradients of its weights. The text form is stage, kind, micro-batch, as in torch's schedule tables: `2F5`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message


class ActionKind(StrEnum):
    """The kinds of actions: forward, backward, and gradients of the weights."""

    F = "F"
    B = "B"
    W = "W"


class Action(NamedTuple):
    """One action of a pipeline rank.

    >>> str(Action(ActionKind.F, 2, 5))
    '2F5'
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse_action(text: str) -> Action:
    """Returns the action of the text form `text`.

    Raises: InputError if `text` is not an action.

    >>> parse_action("2F5").micro_batch
    5
    """
    match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
    if match is None:
        raise InputError(
            Message("pipeline action {text!r} is not stage, F, B or W, and micro-batch, such as '2F5'", text=text)
        )
    return Action(ActionKind(match[2]), int(match[1]), int(match[3]))


def action_dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Returns the actions whose results `action` reads, in a pipeline of `stages` stages."""
    kind, stage, micro_batch = action
    if kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, micro_batch),) if stage else ()
    if kind is ActionKind.W:
        return (Action(ActionKind.B, stage, micro_batch),)
    own = Action(ActionKind.F, stage, micro_batch)
    return (own, Action(ActionKind.B, stage + 1, micro_batch)) if stage < stages - 1 else (own,)
