"""Odd models of a generator under sampled plans are equal to one device, or refused in one line by all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from odd_grammar import TRICKS
from odd_jobs import FAILURES, alone, drawn, run
from odd_models import PLACES, SLOTS, Job, Odd, sample
from sweep import asked

SEEDS = (
    0, 1, 3, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34,
    35, 36, 37, 38, 39, 41, 42, 43, 45, 46, 47, 49, 50, 51, 53, 54, 55, 56, 57, 58, 59, 60, 62, 63, 64, 65, 66, 67,
    69, 70,
)  # fmt: skip
MANY = range(1000, 3000)
FEATURES = [
    *(f"{place}:{trick}" for place in PLACES for trick in TRICKS),
    *(f"{slot}:{name}" for slot, names in SLOTS.items() for name in names),
]


def test_the_same_number_makes_the_same_job_with_the_same_weights() -> None:
    for seed in range(40):
        assert sample(seed) == sample(seed) and drawn(seed) == drawn(seed)
        one, other = Odd(sample(seed)).state_dict(), Odd(sample(seed)).state_dict()
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_feature_is_drawn_and_trains_on_one_device() -> None:
    assert {feature for seed in range(4000) for feature in sample(seed).features} == set(FEATURES)
    for feature in FEATURES:
        if not feature.startswith(("once", "back", "front")):  # the same code as between blocks
            assert torch.tensor(alone(Job(3, (feature,))).losses).isfinite().all(), feature


def failures(ranks: Any, seeds: Any) -> list[str]:
    found = []
    for seed in seeds:
        job, plan = drawn(seed)
        outcome, line = run(ranks, job, plan)
        if outcome in FAILURES:
            found.append(f"{seed} {plan} {','.join(job.features)}: {outcome} {line}")
    return found


@pytest.mark.parametrize("first", SEEDS[::10])
def test_an_odd_model_is_equal_to_one_device_or_refused(ranks: Any, first: int) -> None:
    assert not failures(ranks, SEEDS[first : first + 10])


@pytest.mark.soak
def test_two_thousand_odd_models_are_equal_to_one_device_or_refused(ranks: Any, sweep: Any) -> None:
    _, part, parts = asked()
    assert not failures(ranks, MANY[part - 1 :: parts])
