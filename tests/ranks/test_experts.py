"""Mixtures of experts: under every plan the loss is the loss of one device, whoever holds the experts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import ROWS, alone, anatomy_of, check, difference, make_batch, make_model, make_optimizer, train
from mixtures import MIXTURES
from test_cost_states import held

from meshwright.base.errors import InputError
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.rules import world_faults
from meshwright.spec.runs import missing
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("mixture", "dp2"), ("mixture", "dp2.ep2.z1"), ("mixture", "dp2.ep2.z2.rc-layer"), ("mixture", "dp4.ep2.z3"), ("mixture", "dp2x2.ep2.z2.mb2"), ("mixture", "tp2"),
    ("mixture", "tp2.ep2"), ("mixture", "tp2.sp.ep2.mb2"), ("mixture", "tp2.sp.mb2"), ("mixture", "tp4.ep2"), ("mixture", "dp2.tp2.ep4.z1"), ("mixture", "dp2.pp2.ep2.z3"), ("mixture", "dp2.tp2.pp2.ep2.z3.mb2"),
    ("mixture", "cp2.ep2"), ("mixtral", "dp2.ep2.z2"), ("qwen3-moe", "tp2.sp.ep2.mb2"), ("qwen2-moe", "tp2.ep2"), ("gpt-oss", "dp2.tp2.ep2.z1"), ("gpt-oss", "tp2"),
    ("olmoe", "tp2.ep2"), ("granite-moe", "dp2.ep2.z3"), ("dbrx", "tp2.ep2"),
]  # fmt: skip
"""Each strategy with experts, and each family that computes in float64 throughout, under some of them."""

RATHER = [("deepseek-v3", "dp2.ep2.z3"), ("deepseek-v3", "tp2.ep2"), ("deepseek-v3", "pp3"), ("glm4-moe", "dp2.tp2.ep4.z1")]
"""Routers that compute in float32 whatever the model computes in: their sums are exact to that."""


@functools.cache
def expected(model: str, precision: str) -> dict[str, Any]:
    return alone(model, precision, steps=2)


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_a_mixture_computes_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    check(expected(model, "fp64"), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.parametrize(("model", "plan"), RATHER)
def test_a_mixture_computes_what_one_device_computes_in_float32(ranks: Any, model: str, plan: str) -> None:
    check(expected(model, "fp32"), ranks.run(parse_plan(plan).world, train, model, plan, "fp32", 2), "fp32")


@pytest.mark.parametrize(("first", "second"), [("dp2.tp2.ep4.z3", "tp2"), ("tp2", "dp2.tp2.ep2.z1"), ("dp4.ep2.z2", "pp2")])
def test_a_mixture_goes_on_from_a_checkpoint_of_another_layout_as_if_nothing_had_been(
    ranks: Any, tmp_path: Path, first: str, second: str
) -> None:
    straight = alone("gpt-oss", "fp64", steps=3)["losses"]
    ranks.run(parse_plan(first).world, begin, first, str(tmp_path))
    for losses in ranks.run(parse_plan(second).world, go_on, second, str(tmp_path)):
        assert losses == pytest.approx(straight[2:], rel=1e-10)


def make_trainer(plan: str, precision: str = "fp64", model: str = "gpt-oss") -> Any:
    return parallelize(make_model(model), make_optimizer, plan, precision=precision, clip=1.0, anatomy=anatomy_of(model))


def begin(plan: str, folder: str) -> None:
    """On every rank: two steps, saved."""
    trainer = make_trainer(plan)
    for step in range(2):
        trainer.step(make_batch("gpt-oss", step))
    trainer.save(folder)


def go_on(plan: str, folder: str) -> list[float]:
    """On every rank: the step behind those that were saved."""
    trainer = make_trainer(plan)
    trainer.load(Path(folder) / "step-00000002")
    return [trainer.step(make_batch("gpt-oss", 2)).loss]
