"""The loss is the loss of one device: every strategy, their products, every model, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from equality import alone, check, train

from meshwright.spec.plan import Plan

SAMPLE = [
    ("llama", "dp1"), ("llama", "dp1.mb2.rc-full"), ("llama", "dp1.z3"), ("llama", "dp2"), ("llama", "dp2.z1"),
    ("llama", "dp2.z2"), ("llama", "dp2.z3"), ("llama", "dp4.z1"), ("llama", "dp4.z3.rc-full"), ("llama", "dp2x2.z1"),
    ("llama", "dp2x2.z2"), ("llama", "dp2x2.z3.mb2"), ("llama", "dp8.z3"), ("llama", "tp2.mb4"), ("llama", "tp4.mb4"),
    ("llama", "tp2.sp.mb4"), ("llama", "tp4.sp.mb4.rc-full"), ("llama", "pp2"), ("llama", "pp4"),
    ("llama", "pp2.gpipe"), ("llama", "pp2.interleaved2"), ("llama", "pp4.mb2.rc-full"), ("llama", "dp2.tp2.sp.mb2"),
    ("llama", "dp2.tp2.z1.mb2"), ("llama", "dp2.tp2.sp.z3.mb2"), ("llama", "dp2.pp2.z2"), ("llama", "dp2.pp2.z3"),
    ("llama", "tp2.sp.pp2.mb2"), ("llama", "dp2.tp2.sp.pp2.z1.mb2"), ("llama", "dp2.tp2.pp2.z3.mb2.rc-full"),
    ("llama", "dp2.pp2.z3.interleaved2"), ("llama", "dp2x2.pp2.z2.gpipe"), ("llama-tied", "pp2"),
    ("llama-tied", "dp2.z3"), ("llama-tied", "dp2.pp2.z3"), ("gpt2", "dp2.z2.mb2"), ("gpt2", "tp2.sp.mb4"),
    ("gpt2", "pp4"), ("gpt2", "dp2.tp2.sp.z3.mb2"), ("gpt2", "dp2.pp2.z1"), ("gpt2", "dp2.pp2.z3"),
    ("gpt2", "tp2.pp2.mb2.interleaved2"), ("bert", "dp4.z3"), ("bert", "tp4.sp.mb4"), ("bert", "pp2.rc-full"),
    ("bert", "dp2.tp2.pp2.z2.mb2"), ("convnet", "dp4"), ("convnet", "dp2.z1"), ("convnet", "dp2.z2"),
    ("convnet", "tp2"), ("convnet", "dp2x2.z3"), ("hf-llama", "dp2.z3.rc-full"), ("hf-llama", "tp2.sp.pp2.mb2"),
    ("hf-llama", "dp2.tp2.pp2.z3.mb2"), ("hf-llama", "pp2.interleaved2"), ("hf-gpt2", "dp2.z2"),
    ("hf-gpt2", "tp4.sp.mb4"), ("hf-gpt2", "dp2.tp2.pp2.z1.mb2"), ("hf-gpt2", "dp2.pp2.z3"),
]  # fmt: skip
"""A covering sample: each axis alone, each pair of axes, each model under each kind of strategy."""


EVERY_TIME = [
    ("llama", "dp2.tp2.pp2.z3.mb2.rc-full"), ("llama", "tp2.sp.pp2.mb2"),
    ("bert", "pp2.rc-full"), ("convnet", "dp2.z1"),
]  # fmt: skip
"""The pairs that `make test` runs. Each parallelism axis occurs in one of them."""


@pytest.mark.parametrize(
    ("model", "plan"),
    [*EVERY_TIME, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in SAMPLE if pair not in EVERY_TIME)],
)
def test_a_plan_computes_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    world = parse(plan).world
    check(alone(model, "fp64", 2), ranks.run(world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2", "dp2.pp2.z1"),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in SAMPLE[3::4] if pair != ("gpt2", "dp2.pp2.z1")),
    ],
)
def test_a_plan_computes_what_one_device_computes_in_float32(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp32", 2), ranks.run(parse(plan).world, train, model, plan, "fp32", 2), "fp32")


def parse(name: str) -> Plan:
    from meshwright.spec.plan import parse_plan

    return parse_plan(name)
