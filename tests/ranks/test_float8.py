"""Float8 products under every axis. In the recipe of these tests the factors are rounded to float8 and all else is
float64. So a plan equals one device to 1e-10 if it rounds each number as one device does."""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from equality import ROWS, check, make_batch, make_optimizer, measured, read_once
from test_compile import by
from torch import nn
from torch.nn import functional as F

from meshwright.models.registry import build_reference_model
from meshwright.runtime import float8
from meshwright.runtime.float8 import Float8Factor, apply_float8, weight_factor
from meshwright.runtime.tensor_parallel import column
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import recipe
from meshwright.train import trainer as trainers

EXACT = recipe("fp8").but(compute="float64", size=8, rate="fp64", master=0, reduced=0)
STEPS = 2


def make_model() -> nn.Module:
    """One key-value head, so that tensor ranks use parts of replicated projections."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 1, "ffn": 96, "vocab": 96, "seq": 32}
    return build_reference_model({**sizes, "kind": "llama", "qk_norm": True}).double()


def make_trainer(plan: str) -> trainers.Trainer:
    anatomy = read_once("float8", make_model)
    with mock.patch.object(trainers, "check_precision_support"):
        return trainers.parallelize(
            make_model(), make_optimizer, plan, precision=EXACT, clip=1.0, anatomy=anatomy, prove="never"
        )


def train(plan: str) -> dict[str, Any]:
    with by("aot_eager") if parse_plan(plan).compile else nullcontext():
        return measured(make_trainer(plan), "llama", STEPS)


@functools.cache
def alone() -> dict[str, Any]:
    """What one device computes without the runtime: micro-batches of one row, and a cast for each product."""
    model = make_model()
    apply_float8(model, read_once("float8", make_model), EXACT)
    optimizer = make_optimizer(model.parameters())

    def loss(step: int) -> tuple[torch.Tensor, int]:
        batch = make_batch("llama", step)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        count = int((labels != -100).sum())
        rows = [model(input_ids=ids[None]).logits[0] for ids in batch["input_ids"]]
        pairs = zip(rows, labels, strict=True)
        sums = [F.cross_entropy(*pair, ignore_index=-100, reduction="sum") for pair in pairs]
        return torch.stack(sums).sum() / count, count

    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        value, count = loss(step)
        value.backward()
        result["losses"].append(value.item())
        if not step:
            gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            result |= {"first": value.item(), "tokens": count, "gradients": gradients}
        result["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    result["weights"] = {name: each.detach() for name, each in model.named_parameters()}
    result["evaluated"] = loss(99)[0].item()
    return result


PLANS = ("tp2.sp.mb1", "cp2.mb1", "dp2.z3.mb1", "pp2.mb1")
SOAKED = (
    "dp1.mb1", "dp2.z1.mb1", "tp2.mb1", "tp4.mb1", "cp2.tp2.mb1", "dp2.tp2.sp.z3.mb1", "pp2.tp2.mb1",
    "tp2.sp.mb1.rc-full", "tp2.mb1.rc-sac", "tp2.rc-attn.mb1", "dp2.z3.off-parameters.mb1", "dp1.mb1.compile",
    "tp2.mb1.compile", "tp2.sp.mb1.compile", "tp2.sp.mb1.compile.rc-sac",
)  # fmt: skip


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.soak) for plan in SOAKED)])
def test_a_plan_rounds_to_float8_what_one_device_rounds(ranks: Any, plan: str) -> None:
    check(alone(), ranks.run(parse_plan(plan).world, train, plan), "fp64")


def train_without_exchange(plan: str) -> dict[str, Any]:
    with mock.patch.object(float8, "largest_magnitude", lambda x, keys: x):
        return train(plan)


@pytest.mark.parametrize("plan", ["tp2.mb1", pytest.param("cp2.mb1", marks=pytest.mark.soak)])
def test_without_an_exchange_of_magnitudes_ranks_round_otherwise(ranks: Any, plan: str) -> None:
    with pytest.raises(AssertionError, match=r"differs|loss at"):
        check(alone(), ranks.run(2, train_without_exchange, plan), "fp64")


def count_casts(plan: str) -> tuple[int, int, int]:
    """Returns the casts of weights in a step, the bytes of stored casts at its last backward, and those after it."""
    trainer = make_trainer(plan)
    trainer.step(make_batch("llama", 0))
    casts = trainer.engine.float8_casts
    assert casts is not None
    layers = [layer for block in casts.layers.values() for layer in block]
    counted, most, prepare, run = [0], [0], float8.Float8Layer.prepare, trainer.engine.pipeline.run

    def preparing(layer: float8.Float8Layer, undo: torch.Tensor | None, is_cached: bool) -> None:
        counted[0] += is_cached
        prepare(layer, undo, is_cached)

    def of_weight(stored: torch.Tensor, undo: torch.Tensor) -> float8.Float8Factor:
        counted[0] += stored.dtype == torch.float64
        return weight_factor(stored, undo)

    def stored() -> int:
        return sum(layer.cast.nbytes for layer in layers if layer.cast is not None)

    def running(*given: Any) -> Any:
        found = run(*given)
        most[0] = stored()
        return found

    with ExitStack() as stack:
        for place, name, value in (
            (float8.Float8Layer, "prepare", preparing),
            (float8, "weight_factor", of_weight),
            (column, "weight_factor", of_weight),
            (trainer.engine.pipeline, "run", running),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        trainer.step(make_batch("llama", 1))
    return counted[0], most[0], stored()


def test_a_weight_is_cast_once_a_step_and_at_zero_3_in_each_pass(ranks: Any) -> None:
    """Of each block: query, key, value, output, and three layers of the feed-forward."""
    linear = 2 * (2 * 64 * 64 + 2 * 16 * 64 + 3 * 64 * 96)
    halves = linear // 2 + 2 * 16 * 64  # the one key-value head is on both tensor ranks
    assert ranks.run(1, count_casts, "dp1.mb1")[0] == (14, linear, 0)
    assert ranks.run(2, count_casts, "tp2.mb1")[0] == (14, halves, 0)
    assert ranks.run(2, count_casts, "dp2.z3.mb1")[0] == (2 * 14 * ROWS // 2, 0, 0)


def addresses(plan: str) -> set[int]:
    """The distances of all scales of a step from the alignment that the kernel of a card requires."""
    found: set[int] = set()

    def product(one: Float8Factor, other: Float8Factor, *given: Any, **more: Any) -> torch.Tensor:
        found.update(each.undo.data_ptr() % float8.SCALE_ALIGNMENT for each in (one, other))
        return PRODUCT(one, other, *given, **more)

    trainer = make_trainer(plan)
    with mock.patch.object(float8, "scaled_product", product), mock.patch.object(column, "scaled_product", product):
        trainer.step(make_batch("llama", 0))
    return found


PRODUCT = float8.scaled_product


@pytest.mark.parametrize("plan", ["dp1.mb2", "tp2.mb2"])
def test_scales_have_the_addresses_that_the_kernel_requires(ranks: Any, plan: str) -> None:
    assert all(found == {0} for found in ranks.run(parse_plan(plan).world, addresses, plan))
