"""Tricks of odd models that keep something between calls: counters in Python and in buffers, generators, teachers,
weights that a forward writes. odd_grammar.py has the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
from odd_grammar import BLOCKS, WIDTH, WITHOUT_STATE, Trick, buffer, linear
from torch import nn


def count_calls(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if owner.training:
        owner.calls += 1
    return x * (1 + 0.05 * owner.calls)


def count_in_python(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if owner.training:
        owner.turn += 1
    return x * (1 + 0.05 * owner.turn)


TURNS, TURN = {"turn": 0}, [0]


class Turns:
    turn = 0


def count_in_class(owner: Any) -> int:
    Turns.turn += owner.training
    return Turns.turn


def count_in_global_dict(owner: Any) -> int:
    TURNS["turn"] += owner.training
    return TURNS["turn"]


def count_in_global_list(owner: Any) -> int:
    TURN[0] += owner.training
    return TURN[0]


def count_in_function(owner: Any) -> int:
    count_in_function.turn += owner.training  # type: ignore[attr-defined]
    return count_in_function.turn  # type: ignore[attr-defined]


def count_in_list(owner: Any) -> int:
    owner.turns[0] += owner.training
    return owner.turns[0]


def count_in_nested_dict(owner: Any) -> int:
    owner.options["count"]["turn"] += owner.training
    return owner.options["count"]["turn"]


def start_counters(owner: Any) -> None:
    """Sets all counters to zero: those of a process outlive a job."""
    Turns.turn = TURNS["turn"] = TURN[0] = count_in_function.turn = 0  # type: ignore[attr-defined]
    owner.turns, owner.options = [0], {"count": {"turn": 0}}


def closure_counter() -> Callable[[], int]:
    turn = 0

    def next_turn() -> int:
        nonlocal turn
        turn += 1
        return turn

    return next_turn


def counter(counted: Callable[[Any], int], against: str = "state") -> Trick:
    return Trick(lambda owner, x, index: x * (1 + 0.05 * counted(owner)), start_counters, against)


def of_last_call(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    """Reads before the second block what is stored behind the last block, in the forward before."""
    if index == 0:
        x = x + 0.1 * owner.carry
    elif index >= BLOCKS - 1 and owner.training:
        owner.carry = x.detach().mean((0, 1))
    return x


def of_earlier_block(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    """Adds behind the last block what an attribute holds since the first one."""
    if index == 0:
        owner.memory = x
    return x + 0.2 * owner.memory if index == BLOCKS - 1 else x


def seeded_python(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    random.seed(3)
    return x * (1 + 0.1 * random.random())


def running_mean(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if owner.training:
        owner.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return x - owner.mean


def moving_teacher(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if owner.training:
        with torch.no_grad():
            owner.teacher.weight.lerp_(owner.student.weight, 0.1)
    return x + owner.student(x) - 0.5 * owner.teacher(x).detach()


def teacher(owner: Any) -> None:
    owner.student, owner.teacher = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    owner.teacher.weight.requires_grad_(False)


def unit_columns(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if index == 0:
        with torch.no_grad():
            owner.columns.weight.div_(owner.columns.weight.norm(dim=0, keepdim=True))
    return x + 0.5 * owner.columns(x)


def shrunk_data(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    if owner.training:
        owner.shrunk.weight.data.mul_(0.99)
    return x + 0.5 * owner.shrunk(x)


STATE: dict[str, Trick] = {
    "counter": Trick(count_calls, buffer("calls", lambda: torch.zeros(())), "state"),
    "python-counter": Trick(count_in_python, lambda owner: setattr(owner, "turn", 0), "state"),
    "count-class": counter(count_in_class, "any"),
    "count-global-dict": counter(count_in_global_dict, "any"),
    "count-global-list": counter(count_in_global_list, "any"),
    "count-function": counter(count_in_function, "any"),
    "count-list": counter(count_in_list),
    "count-nested-dict": counter(count_in_nested_dict),
    "count-closure": Trick(
        lambda owner, x, index: x * (1 + 0.05 * owner.next_turn()),
        lambda owner: setattr(owner, "next_turn", closure_counter()),
        "any",
    ),
    "count-iterator": Trick(
        lambda owner, x, index: x * (1 + 0.05 * next(owner.numbers)),
        lambda owner: setattr(owner, "numbers", count(1)),
        "any",
    ),
    "python-random": Trick(
        lambda owner, x, index: x * (1 + 0.1 * owner.dice.random()),
        lambda owner: setattr(owner, "dice", random.Random(7)),
        "any",
    ),
    "numpy-random": Trick(
        lambda owner, x, index: x * (1 + 0.1 * owner.dice_of_numpy.random()),
        lambda owner: setattr(owner, "dice_of_numpy", np.random.default_rng(7)),
        "any",
    ),
    "seeded-python": Trick(seeded_python, against="any"),
    "generator": Trick(
        lambda owner, x, index: x * (1 + 0.1 * torch.rand(WIDTH, generator=owner.rng, dtype=x.dtype)),
        lambda owner: setattr(owner, "rng", torch.Generator().manual_seed(7)),
        "any",
    ),
    "last-call": Trick(of_last_call, buffer("carry", lambda: torch.zeros(WIDTH), False), "any"),
    "earlier-block": Trick(of_earlier_block, lambda owner: setattr(owner, "memory", 0.0), "any"),
    "running-mean": Trick(running_mean, buffer("mean", lambda: torch.zeros(WIDTH)), "state rows sequence"),
    "moving-teacher": Trick(moving_teacher, teacher, "state writes"),
    "shrunk-data": Trick(shrunk_data, linear("shrunk"), "state writes"),
    "unit-columns": Trick(unit_columns, linear("columns"), "writes"),
}

TRICKS = {**WITHOUT_STATE, **STATE}
"""All tricks by name."""
