"""Odd models of a generator under sampled plans are equal to one device, or refused in one line by all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_jobs import DIFFERS, EQUAL, FAILURES, REFUSED, alone, drawn, is_legal, run, write_table
from odd_models import PLACES, SLOTS, Job, Odd, sample
from odd_state import TRICKS
from sweep import asked

from meshwright.spec.plan import parse_plan

FOUR_RANKS = (2, 17, 19, 33, 38, 39)
SAMPLE = (0,)
"""Where in SEEDS the groups of ten jobs begin that `make test` runs. The soak runs all six groups."""
SEEDS = [seed for seed in range(63) if seed in FOUR_RANKS or parse_plan(drawn(seed)[1]).world <= 2]
"""Sixty jobs: six on four ranks, the others on one or two, which takes half as long."""
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


def test_every_feature_is_drawn() -> None:
    assert {feature for seed in range(4000) for feature in sample(seed).features} == set(FEATURES)


@pytest.mark.soak
def test_every_feature_trains_on_one_device() -> None:
    for feature in FEATURES:
        if not feature.startswith(("once", "back", "front")):  # the same code as between blocks
            assert torch.tensor(alone(Job(3, (feature,))).losses).isfinite().all(), feature


def prove_of(seed: int) -> dict[str, str]:
    """A third of the jobs run with the proof as users have it."""
    return {"prove": "auto"} if seed % 3 == 0 else {}


def entries_of(ranks: Any, seeds: Any) -> list[dict[str, Any]]:
    found = []
    for seed in seeds:
        job, plan = drawn(seed)
        outcome, line = run(ranks, job, plan, **prove_of(seed))
        found.append(
            {
                "seed": seed,
                "plan": plan,
                "features": job.features,
                "legal": is_legal(job, plan),
                "outcome": outcome,
                "line": line,
            }
        )
    return found


def failures(entries: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['seed']} {each['plan']} {','.join(each['features'])}: {each['outcome']} {each['line']}"
        for each in entries
        if each["outcome"] in FAILURES
    ]


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.soak] * (first not in SAMPLE)) for first in range(0, len(SEEDS), 10)],
)
def test_an_odd_model_is_equal_to_one_device_or_refused(ranks: Any, first: int) -> None:
    assert not failures(entries_of(ranks, SEEDS[first : first + 10]))


def test_six_of_sixty_jobs_run_on_four_ranks_one_of_them_in_make_test() -> None:
    worlds = [parse_plan(drawn(seed)[1]).world for seed in SEEDS]
    assert len(worlds) == 60 and worlds.count(4) == 6
    assert sum(worlds[first : first + 10].count(4) for first in SAMPLE) == 1


@pytest.mark.soak
def test_two_thousand_odd_models_are_equal_to_one_device_or_refused_and_counted(ranks: Any, sweep: Any) -> None:
    """Parts of a soak write into one table."""
    _, part, parts = asked()
    entries = entries_of(ranks, MANY[part - 1 :: parts])
    write_table(entries, keep=parts > 1)
    assert not failures(entries)


def test_the_table_of_a_soak_counts_jobs_by_outcome_and_keeps_those_of_other_parts(tmp_path: Path) -> None:
    one = {"seed": 1, "plan": "dp2", "features": (), "legal": True, "outcome": EQUAL, "line": ""}
    two = {**one, "seed": 2, "outcome": REFUSED, "line": "plan dp2: no"}
    write_table([one], keep=False, folder=tmp_path)
    write_table(
        [two, {**one, "seed": 4, "legal": False, "outcome": DIFFERS, "line": "loss 1 | 2"}], keep=True, folder=tmp_path
    )
    text = (tmp_path / "odd.md").read_text()
    assert "| 1 to 4 | 3 | 1 | 1 | 2 | 1 (50.0 %) | 0 | 1 |" in text, text
    assert "| 4 | `dp2` |  | DIFFERS: loss 1 / 2 |" in text
    write_table([one], keep=False, folder=tmp_path)
    assert "| 1 to 1 | 1 | 1 | 0 | 1 | 0 (0.0 %) | 0 | 0 |" in (tmp_path / "odd.md").read_text()
