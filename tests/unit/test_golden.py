"""Golden plans of ten canonical jobs: a change of the cost model that changes a choice must be seen.

`python tests/unit/test_golden.py` rewrites them; read the difference before committing it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import CANONICAL, named_job

from meshwright.planner.search.best_plans import SearchResult
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.space import PlanSpace
from meshwright.planner.simulate.run import simulate

LONG = ("llama2-70b-on-8x8-h100", "llama-65b-on-8x8-a100-40gb", "gpt3-175b-on-128x8-a100-80gb")
NAMES = [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in CANONICAL]
FOLDER = Path(__file__).parent / "golden" / "plans"


@functools.cache
def found(name: str) -> SearchResult:
    """Of a canonical job, asked once."""
    return search_plans(named_job(*CANONICAL[name]), top=3)


def answer(name: str) -> dict[str, Any]:
    """What is kept of a job's answer: the job, the first three plans by name, and the size of the space under 1F1B. A
    new schedule does not change this size."""
    space = PlanSpace(named_job(*CANONICAL[name]).but(pins={"schedule": "1f1b"}))
    considered = sum(region.legal for region in space.groups()) + sum(it.count for it in space.rejected.values())
    model, cluster, batch, sequence, precision = CANONICAL[name]
    return {
        "job": {"model": model, "cluster": cluster, "batch": batch, "sequence": sequence, "precision": precision},
        "plans": [entry.name for entry in found(name).plans],
        "considered of 1f1b": considered,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_plans_of_a_canonical_job_are_the_golden_ones(name: str) -> None:
    assert answer(name) == json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_best_plans_of_canonical_jobs_are_within_2_percent_of_the_estimate(name: str) -> None:
    """When they are played."""
    for entry in found(name).plans:
        seconds = simulate(named_job(*CANONICAL[name]), entry.plan).seconds
        assert seconds == pytest.approx(entry.estimate.time.step, rel=0.02), entry.plan.name


def test_every_golden_file_is_of_a_canonical_job() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CANONICAL)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in CANONICAL:
        (FOLDER / f"{name}.json").write_text(json.dumps(answer(name), indent=2) + "\n")
