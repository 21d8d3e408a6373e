"""Sequence parallelism cuts only what is seen to work on each position alone; anything else is refused in one line, and
tp alone is exact."""

from __future__ import annotations

from typing import Any

import pytest
from odd_splits import ALONE, ALONG
from pool import unchecked
from test_split_proofs import FEW, check, few_and_others

BETWEEN = [name for name in ALONG if name != "late"]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        pytest.param("tp2.sp", [*FEW, "late"], id="tp2.sp-few"),
        pytest.param(
            "tp2.sp", [name for name in ALONG if name not in (*FEW, "late")], id="tp2.sp", marks=pytest.mark.soak
        ),
        pytest.param("tp2.sp.pp2", ["mean", "first token", "length", "shift"], id="tp2.sp.pp2", marks=pytest.mark.soak),
    ],
)
def test_what_mixes_positions_in_a_block_is_refused_with_the_block(ranks: Any, plan: str, names: list[str]) -> None:
    check(ranks, plan, [f"in: {name}" for name in names], "sp: blocks.0: on a slice of the sequence")


def test_one_odd_block_training_code_and_a_gate_of_zero_are_seen(ranks: Any) -> None:
    check(
        ranks,
        "tp2.sp",
        ["first block: first token", "training: mean", "gated: mean"],
        "sp: blocks.0: on a slice of the sequence",
    )


@pytest.mark.parametrize("names", few_and_others(list(FEW), BETWEEN))
def test_what_mixes_positions_between_blocks_is_refused_with_the_block_behind(ranks: Any, names: list[str]) -> None:
    check(
        ranks,
        "tp2.sp",
        [f"between: {name}" for name in names],
        "sp: on a slice of the sequence the input of blocks.1 ",
    )


def test_a_layer_between_blocks_gets_its_gradient_from_all_slices(ranks: Any) -> None:
    check(ranks, "tp2.sp", ["between: layer"], None)


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        ("tp2.sp", "sp: the adapter on between is outside of the blocks"),
        pytest.param("tp2", None, marks=pytest.mark.soak),
    ],
)
def test_an_adapter_between_blocks_is_refused_where_its_gradient_would_be_a_part(
    ranks: Any, plan: str, refused: str | None
) -> None:
    check(ranks, plan, ["between: layer, adapted"], refused)


ALONE_CASES = [("tp2.sp", f"{place}: {name}") for place in ("in", "between") for name in ALONE]
ALONE_CASES += [("tp2.sp", "zero gate"), *(("tp2.sp.pp2", f"in: {name}") for name in ALONE)]


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "way"), ALONE_CASES)
def test_what_works_on_each_position_alone_is_cut_and_exact(ranks: Any, plan: str, way: str) -> None:
    check(ranks, plan, [way], None)


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.covering(1)
def test_behind_the_blocks_every_rank_has_the_whole_sequence(ranks: Any, name: str) -> None:
    check(ranks, "tp2.sp", [f"behind: {name}"], None, unchecked)


@pytest.mark.parametrize("way", [f"{place}: {name}" for place in ("in", "between") for name in ALONG])
@pytest.mark.covering(1)
def test_tensor_ranks_alone_hold_the_whole_sequence(ranks: Any, way: str) -> None:
    check(ranks, "tp2", [way], None, unchecked)
