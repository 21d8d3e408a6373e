"""Pipelines on real ranks: every schedule, every placement of stages, with every other strategy, equal to one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from equality import alone, check, train

from meshwright.spec.plan import parse_plan

SAMPLE = [
    ("llama", "pp2.zb1"), ("llama", "pp4.zb1"), ("llama", "pp2.zbv"), ("llama-tied", "pp2.zbv"), ("llama", "pp2.dualpipev.mb2"),
    ("llama-tied", "dp2.pp2.z1.zbv"), ("llama", "dp2.pp2.z2.zb1"), ("llama-tied", "dp2.pp2.z3.zbv"), ("gpt2", "tp2.pp2.zb1"),
    ("llama", "tp2.sp.pp2.zb1"), ("hf-gpt2", "pp2.zbv.rc-layer"), ("llama", "pp2.zbv.ls1-1-1-1"), ("llama", "pp2.zb1.ls1-3"),
]  # fmt: skip


@functools.cache
def expected(model: str, precision: str) -> dict[str, Any]:
    return alone(model, precision, steps=2)


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_every_schedule_computes_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(expected(model, "fp64"), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")
