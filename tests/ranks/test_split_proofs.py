"""A split of weights or of the sequence is proven in training conditions, with gradients: equal to one device, or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from odd_splits import ALONE, ALONG, is_equal, outcomes

from meshwright.spec.plan import parse_plan

MIXED = [name for name in ALONG if name not in ("flip", "late")]
"""A rank's two chunks are each other's mirror images, so that context ranks flip a sequence exactly; what is late shows in a long batch alone."""


def check(ranks: Any, plan: str, ways: list[str], refused: str | None) -> None:
    """Every rank says the same: that it is equal to one device, or, where `refused` is not None, a line with it and no other outcome."""
    results = ranks.run(parse_plan(plan).world, outcomes, plan, ways)
    for number, way in enumerate(ways):
        found = [result[number] for result in results]
        if refused is None:
            assert not isinstance(found[0], str), f"{way}: {found[0]}"
            assert all(is_equal(one, way) for one in found), f"{way}: trained another model"
        else:
            assert all(isinstance(one, str) for one in found), f"{way}: {'equal' if is_equal(found[0], way) else 'trained another model'}"
            assert len(set(found)) == 1, f"{way}: {found}"
            assert refused in found[0], f"{way}: {found[0]}"
            assert "\n" not in found[0], f"{way}: {found[0]}"


def test_context_ranks_refuse_what_mixes_positions_in_a_block(ranks: Any) -> None:
    ways = [f"in: {name}" for name in MIXED]
    check(ranks, "cp2", [*ways, "in: late", "first block: first token", "training: mean", "gated: mean"], "plan cp2: cp(2) cannot cut Odd")


def test_context_ranks_refuse_what_mixes_positions_between_and_behind_blocks(ranks: Any) -> None:
    ways = [f"between: {name}" for name in MIXED] + [f"behind: {name}" for name in MIXED if name not in ("length", "positions")]
    check(ranks, "cp2", ways, "plan cp2: cp(2) cannot cut Odd")


def test_context_ranks_take_what_works_on_each_position_alone(ranks: Any) -> None:
    ways = [f"{place}: {name}" for place in ("in", "between", "behind") for name in ALONE]
    check(ranks, "cp2", [*ways, "between: layer", "behind: length", "behind: positions", "zero gate"], None)


@pytest.mark.parametrize("plan", ["cp2.ulysses", "cp2.pp2"])
def test_context_ranks_refuse_it_beside_other_axes(ranks: Any, plan: str) -> None:
    check(ranks, plan, ["in: first token", "in: length", "in: positions"], f"plan {parse_plan(plan).name}: cp(2) cannot cut Odd")
