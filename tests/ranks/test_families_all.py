"""Every causal family of transformers that runs on one device at a tiny size, under plans: equal to one device, or
refused in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from auto_classes import FEW_KEYS, SIX, THREE, USUAL, Sizes, everyone_of, tried
from sweep import UNTRIED, asked

transformers = pytest.importorskip("transformers")
PLANS: dict[str, Sizes] = {
    "tp2.mb4": USUAL, "tp2.sp.mb4": USUAL, "pp2.mb2": USUAL, "dp2.z3.mb4": USUAL, "cp2.mb4": USUAL, "tp3.mb4": THREE,
    "tp4.mb4": FEW_KEYS, "tp6.mb4": SIX,
}  # fmt: skip
"""The sizes that each is tried with: 3 heads and 509 words on 3 ranks, 2 key-value heads on 4 and on 6."""


def pairs() -> list[tuple[str, str]]:
    return [(family, plan) for family in everyone_of("causal") for plan in PLANS]


@functools.cache
def found_of(family: str) -> dict[str, Any]:
    """Under the plans of this part of the soak: those of equal sizes at once."""
    _, part, parts = asked()
    mine = [plan for one, plan in pairs()[part - 1 :: parts] if one == family]
    found: dict[str, Any] = {}
    for sizes in dict.fromkeys(PLANS.values()):
        plans = [plan for plan in mine if PLANS[plan] is sizes]
        more = tried(family, plans, sizes) if plans else {}
        found |= {plan: more.get(plan, more.get("", f"{UNTRIED}too slow")) for plan in plans}
    return found


def judge(family: str, plan: str) -> tuple[float, float] | str:
    found = found_of(family)[plan]
    assert not isinstance(found, dict), found["differs"]
    return found if isinstance(found, str) else (found[0], found[1])


@pytest.mark.soak
def test_every_causal_family_is_equal_to_one_device_or_refused_in_one_line(sweep: Callable[..., None]) -> None:
    sweep(
        "families_all", f"Every causal family of transformers {transformers.__version__}", pairs(), judge, by_plan=True
    )
