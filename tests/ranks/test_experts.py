"""Mixtures of experts: under every plan the loss is the loss of one device, whoever holds the experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from equality import alone, check, train

from meshwright.spec.plan import parse_plan

SAMPLE = [
    ("mixture", "dp2.ep2.z1"), ("mixture", "tp2.ep2"), ("mixture", "tp2"), ("mixture", "dp2.ep2.z3"),
]  # fmt: skip


@functools.cache
def expected(model: str, precision: str) -> dict[str, Any]:
    return alone(model, precision, steps=2)


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_a_mixture_computes_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    check(expected(model, "fp64"), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")
