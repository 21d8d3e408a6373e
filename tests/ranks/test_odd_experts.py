"""Experts are divided where it is proven in training conditions, with gradients: equal to one device, or refused by all
ranks in one line."""

from __future__ import annotations

from typing import Any

import pytest
from odd_mixtures import is_alone, make_mixture, mixed_outcomes, random_states

from meshwright.analysis.analyze import analyze_model
from meshwright.spec.plan import parse_plan

OVER_TOKENS = [
    "noise", "capacity", "square", "backward tokens", "many tokens", "written", "scaled", "pairs normed", "zero gate",
    "zero down", "many tokens, width", "eval square",
]  # fmt: skip
"""What the rank of an expert would do otherwise: with its own pairs alone, or with experts that are numbered from 0."""
OVER_WIDTH = ["training width", "backward width", "eval width"]
"""What a slice of the inner features would do otherwise."""
ALIKE = ["nothing", "zero down, nothing"]


@pytest.mark.parametrize("way", [*OVER_TOKENS, *OVER_WIDTH, *ALIKE])
@pytest.mark.covering(2)
def test_experts_are_divided_as_far_as_their_training_shows_it(way: str) -> None:
    found = analyze_model(make_mixture(way))
    if way in OVER_TOKENS:
        assert not found.experts
        assert any(
            "4 experts are not sharded: the check with simulated ranks failed (" in line for line in found.findings
        )
    else:
        assert len(found.experts) == 2
        assert all(bool(experts.splits) == (way in ALIKE) for experts in found.experts)


FEW = ["noise", "capacity", "backward tokens", "many tokens", "zero gate"]
"""The cases that `make test` runs. `make soak` runs all cases."""


def outcomes_of(ranks: Any, plan: str, ways: list[str]) -> dict[str, Any]:
    """What rank 0 says of each way, where the others say the same; a refusal is one line."""
    results = ranks.run(parse_plan(plan).world, mixed_outcomes, plan, ways)
    for number, way in enumerate(ways):
        found = [result[number] for result in results]
        if isinstance(found[0], str):
            assert len(set(found)) == 1, f"{way}: {found}"
            assert "\n" not in found[0]
        else:
            assert all(is_alone(one, way) for one in found), f"{way}: trained another model"
    return dict(zip(ways, results[0], strict=True))


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(FEW, id="few"),
        pytest.param([way for way in OVER_TOKENS if way not in FEW], id="others", marks=pytest.mark.soak),
    ],
)
def test_expert_ranks_refuse_what_they_would_train_otherwise(ranks: Any, ways: list[str]) -> None:
    for way, said in outcomes_of(ranks, "dp2.ep2.z1", ways).items():
        assert isinstance(said, str), way
        assert said.startswith("plan dp2.ep2.z1: "), said


@pytest.mark.parametrize(
    "way",
    [
        "backward width",
        *(pytest.param(way, marks=pytest.mark.soak) for way in (*OVER_WIDTH, *ALIKE) if way != "backward width"),
    ],
)
def test_expert_ranks_take_experts_that_compute_each_pair_by_itself(ranks: Any, way: str) -> None:
    found = outcomes_of(ranks, "dp2.ep2.z1", [way])
    assert not any(isinstance(said, str) for said in found.values()), found


@pytest.mark.parametrize("plan", ["tp2", "tp2.ep2.mb2", "tp2.sp.mb2"])
@pytest.mark.soak
def test_tensor_ranks_are_equal_to_one_device_or_refuse(ranks: Any, plan: str) -> None:
    ways = [way for way in (*OVER_TOKENS, *OVER_WIDTH) if way != "noise"]  # another seed draws other numbers
    found = outcomes_of(ranks, plan, [*ways, *ALIKE])
    assert not any(isinstance(found[way], str) for way in ALIKE), found


@pytest.mark.parametrize("plan", [pytest.param("tp2", marks=pytest.mark.soak), "tp2.ep2.mb2"])
def test_tensor_ranks_have_equal_random_states_behind_experts_that_drop(ranks: Any, plan: str) -> None:
    one, two = ranks.run(2, random_states, plan)
    assert one == two
