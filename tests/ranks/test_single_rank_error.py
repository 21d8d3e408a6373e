"""One rank alone raises: every rank ends with the same line, which names that rank, and none waits for a message that
nobody sends."""

from __future__ import annotations

import itertools
import os
import re
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.runtime.comm.shm.memory import SHARED_MEMORY_ENV
from meshwright.train.trainer import Trainer, parallelize

WORDS, WIDTH, HEADS = 32, 16, 2
BAD = 1
"""The rank that raises."""
PLANS = ("dp2", "tp2", "pp2.mb2", "dp2.z3", "cp2")
PLACES = ("analysis", "first forward", "forward", "loss", "hook", "optimizer", "batch", "example")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """`broken`: the place where the rank BAD raises once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.broken = ""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        if self.broken == "hook" and x.requires_grad:
            x.register_hook(lambda gradient: raise_here())
        if self.broken in ("analysis", "first forward", "forward"):
            raise_here()
        return x


def raise_here() -> NoReturn:
    raise ValueError("a bad value\nof several lines")


class Raised(NamedTuple):
    """What a rank raises: its class, its words, and the rank that it says is the cause."""

    kind: str
    line: str
    by: int | None


def attempted(plan: str, place: str, shared: bool) -> Raised:
    """The rank that raised waits until the other has ended."""
    os.environ[SHARED_MEMORY_ENV] = str(int(shared))
    is_bad = dist.get_rank() == BAD
    torch.manual_seed(0)
    model, is_broken = Model().double(), []
    ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if is_bad and place == "optimizer":
            raise_here()
        return torch.optim.AdamW(parameters, lr=1e-2)

    def loss(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        if is_broken:
            raise_here()
        return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())

    known: dict[str, Any] = {"loss": loss} if place == "loss" else {}
    if is_bad and place == "example":
        known["example"] = {"input_ids": ids, "nonsense": ids}
    if is_bad and place == "analysis":
        model.broken = place
    raised = Raised("", "it trained", None)
    try:
        trainer = parallelize(model, optimizer, plan, precision="fp64", **known)
        if place != "first forward":
            trainer.step(batch)
        if is_bad:
            model.broken = place
            is_broken.append(True)
        trainer.step([batch] if is_bad and place == "batch" else batch)  # type: ignore[arg-type]
    except Exception as error:
        raised = Raised(type(error).__name__, str(error), getattr(error, "raised_by", None))
    finally:
        del os.environ[SHARED_MEMORY_ENV]
    ended(is_bad)
    return raised


def ended(is_bad: bool) -> None:
    """The rank that raised keeps its connections until the other has ended, whose wait therefore does not end by the
    loss of one."""
    store = _get_default_store()
    if is_bad:
        store.wait(["ended"], timedelta(seconds=60))
    else:
        store.set("ended", "")


def cases() -> list[Any]:
    """Own losses are refused under cp by all ranks alike."""
    every = itertools.product(PLANS, PLACES, (True, False))
    return [
        pytest.param(plan, place, shared, id=f"{plan}-{place}-{'memory' if shared else 'gloo'}")
        for plan, place, shared in every
        if (plan, place) != ("cp2", "loss")
    ]


@pytest.mark.parametrize(("plan", "place", "shared"), cases())
@pytest.mark.covering(7)
def test_all_ranks_end_with_the_line_of_the_one_that_raised(ranks: Any, plan: str, place: str, shared: bool) -> None:
    other, bad = ranks.run(2, attempted, plan, place, shared, timeout=120.0)
    if bad.kind == "ValueError":
        assert other.kind == "MeshwrightError" and other.by == BAD
        assert re.fullmatch(
            r"rank 1 raised ValueError: a bad value \(test_single_rank_error\.py:\d+ in raise_here\)", other.line
        )
    elif other.by == BAD:
        assert (other.kind, other.line) == (bad.kind, f"rank 1: {bad.line}")
    else:  # all ranks refuse alike
        assert (other.kind, other.line) == (bad.kind, bad.line) == ("PlanRefused", bad.line)
    assert "\n" not in other.line


def gone_on(shared: bool) -> list[str]:
    """What this rank says of: a batch that both ranks refuse, a good one, a batch that the rank BAD alone refuses,
    another step, another trainer."""
    os.environ[SHARED_MEMORY_ENV] = str(int(shared))
    ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
    good, is_bad = {"input_ids": ids, "labels": ids}, dist.get_rank() == BAD
    trainer, said = made("dp2"), []
    for batch in ([good], good, [good] if is_bad else good, good):
        try:
            said.append(f"{trainer.step(batch).loss:.6f}")  # type: ignore[arg-type]
        except Exception as error:
            said.append(str(error))
    try:
        trainer = made("dp2")
        said.append(f"{trainer.step(good).loss:.6f}")
    except Exception as error:
        said.append(str(error))
    finally:
        del os.environ[SHARED_MEMORY_ENV]
    return said


def made(plan: str) -> Trainer:
    torch.manual_seed(0)
    return parallelize(
        Model().double(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), plan, precision="fp64"
    )


def test_ranks_go_on_after_what_all_refuse_and_not_after_what_one_refuses(ranks: Any) -> None:
    other, bad = ranks.run(2, gone_on, True, timeout=120.0)
    refused = "a batch must be a dict of tensors by the argument names of forward, but a list was given"
    assert (other[0], bad[0]) == (refused, refused)
    assert other[1] == bad[1] == other[4] == bad[4]
    assert (other[2], bad[2]) == (f"rank 1: {refused}", refused)
    parted = (
        "an error in an earlier call left the ranks in different collectives, so they cannot continue "
        f"(rank 1: {refused}): restart all ranks"
    )
    assert other[3] == bad[3] == parted


def test_process_groups_that_were_left_are_not_used_again(ranks: Any) -> None:
    other, bad = ranks.run(2, gone_on, False, timeout=120.0)
    assert all("left the ranks in different collectives" in line for said in (other, bad) for line in said[3:]), (
        other,
        bad,
    )
