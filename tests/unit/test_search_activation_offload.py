"""Activations in files: what a disk makes of a step, what waits in the file, and where the search takes them."""

from __future__ import annotations

import pytest
from jobs import cluster, decoder, small_job

from meshwright.core.errors import InputError
from meshwright.planner.cost.constants import OVERLAP_SLOWDOWN
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan

BLOCKS, MICRO_BATCHES = 8, 4
WHOLE = "dp1.mb8"


def on_a_disk(rate: float, budget: float = 0.0, **pins: object) -> Job:
    """Of one rank that has a disk and no link to its host."""
    on = cluster(1, 1)
    on = on.but(groups=(on.groups[0].but(storage_bandwidth=rate),), budget=budget)
    return small_job(decoder(((BLOCKS, 512),), hidden=256), on, batch=8 * MICRO_BATCHES, pins=pins, sequence=2048)


def both(job: Job, way: str = "") -> tuple[Estimate, Estimate]:
    return estimate(job, parse_plan(WHOLE)), estimate(job, parse_plan(f"{WHOLE}.off-activations-disk{way}"))


def test_a_disk_is_waited_for_as_long_as_it_takes_but_for_what_runs_meanwhile() -> None:
    here, away = both(on_a_disk(1e6))
    kept = away.in_files * BLOCKS / (BLOCKS - 1)  # what the last block keeps stays, in the file is the rest
    beside = (1 - OVERLAP_SLOWDOWN) * (here.time.compute / MICRO_BATCHES)
    assert away.time.offload == pytest.approx(MICRO_BATCHES * (2 * kept / 1e6 - beside), rel=1e-3)
    fast = both(on_a_disk(1e15))[1]
    assert fast.time.offload < 1e-3 * fast.time.step


def test_of_so_many_blocks_so_much_waits_and_two_stay_while_one_of_them_runs() -> None:
    job = on_a_disk(1e9)
    here, away = both(job)
    four = both(job, "4")[1]
    block = away.in_files / (BLOCKS - 1)
    assert four.in_files == pytest.approx(3 * block)
    assert here.memory.activations - four.memory.activations == pytest.approx(3 * block)
    assert 6 * block <= here.memory.activations - away.memory.activations <= 7 * block * (1 + 1e-9)


def test_the_search_offloads_to_disk_only_if_needed_and_only_with_a_known_disk() -> None:
    here, away = both(on_a_disk(1e12))
    budget = (here.memory.reserved + away.memory.reserved) / 2
    pins = {"recompute": "none", "micro_batch": 8, "zero": 0}
    found = search_plans(on_a_disk(1e12, budget, **pins), top=1).chosen
    assert found.name == f"{WHOLE}.off-activations-disk" and found.estimate.fits
    with pytest.raises(InputError, match="no storage_bandwidth"):
        estimate(on_a_disk(0.0), parse_plan(f"{WHOLE}.off-activations-disk"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp1.off-activations.off-activations-disk", "names activations twice"),
        ("dp1.rc-full2.off-activations-disk3", "off-activations-disk3: recompute must apply to all blocks of a stage"),
    ],
)
def test_what_means_nothing_is_one_line(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_plan(name)


def test_a_name_reads_back_and_a_plan_of_before_loads() -> None:
    plan = parse_plan("dp2.z1.off-optimizer-disk60.off-activations-disk8")
    assert (
        plan.name == "dp2.z1.off-optimizer-disk60.off-activations-disk8"
        and Plan.model_validate_json(plan.to_json()) == plan
    )
    assert parse_plan("dp1.off-activations8").but(offload=("activations-disk",)).name == "dp1.mb1.off-activations-disk8"
