"""Shards by memory: the planner gives each group the part of the states that it has room for, where equal parts do not
fit."""

from __future__ import annotations

import pytest
from test_search_heterogeneous import unlike_job

from meshwright.planner.cost.step import estimate
from meshwright.planner.search import uneven_batches
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.uneven_batches import round_shard_weights
from meshwright.spec.estimate import FitStatus
from meshwright.spec.job import Job
from meshwright.spec.layout import ALIGN_NUMEL
from meshwright.spec.plan import Plan, parse_plan


def tight_job(large: float = 64e6, small: float = 32e6) -> Job:
    """Two nodes of two equal devices, but for their memory, on links that make pipelines no better."""
    job = unlike_job(slower=1.0, batch=8)
    groups = tuple(
        group.but(device=group.device.but(memory=size))
        for group, size in zip(job.cluster.groups, (large, small), strict=True)
    )
    return job.but(cluster=job.cluster.but(groups=groups))


def test_equal_weights_cost_what_no_weights_cost() -> None:
    job = tight_job()
    for name in ("dp4.z1", "dp4.z2", "dp4.z3"):
        plain, equal = (estimate(job, parse_plan(each)) for each in (name, f"{name}.zw1-1-1-1"))
        assert equal.time.step == pytest.approx(plain.time.step, rel=1e-12)
        assert {estimate(job, parse_plan(f"{name}.zw{each}")).memory.optimizer for each in ("1-1-1-1", "3-3-3-3")} == {
            plain.memory.optimizer
        }


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_rank_is_priced_with_its_part_and_the_step_with_the_largest(zero: int) -> None:
    job = tight_job(1e9, 1e9)
    even, large = (estimate(job, parse_plan(f"dp4.z{zero}.zw{parts}")) for parts in ("1-1-1-1", "3-1-1-1"))
    line = ALIGN_NUMEL * (job.workload.recipe.master + job.workload.optimizer.states * job.workload.recipe.state_size)
    assert (
        0 < 2 * even.memory.optimizer - large.memory.optimizer <= sum(layer.repeat for layer in job.model.layers) * line
    )  # one a unit at most
    assert large.time.step > even.time.step


@pytest.mark.parametrize("small", [*(pytest.param(each, marks=pytest.mark.soak) for each in (24e6, 28e6, 32e6)), 40e6])
def test_shards_by_memory_fit_where_equal_ones_do_not_and_are_never_worse(small: float) -> None:
    job = tight_job(small=small)
    found = [plan for _, plan in uneven_batches.uneven_batch_plans(job, 20) if plan.shard_weights]
    assert found
    for plan in found:
        assert estimate(job, plan).fits
        assert not estimate(job, plan.but(shard_weights=())).fits
        first, *_, last = plan.shard_weights
        assert first > last
    chosen = search_plans(job).chosen
    for plan in found:
        assert chosen.estimate.time.step <= estimate(job, plan).time.step * 1.05


@pytest.mark.soak
def test_a_device_whose_memory_binds_holds_less_and_the_planner_says_so() -> None:
    """Brute force over all weights up to 16: none that fits is faster by more than the largest shard's whole number."""
    job = tight_job(small=28e6)
    found = next(
        plan for _, plan in uneven_batches.uneven_batch_plans(job, 50) if plan.shard_weights and plan.zero == 3
    )
    best = min(
        (priced.time.step for large in range(1, 17) for small in range(1, large + 1)
         if (priced := estimate(job, found.but(shard_weights=(large, large, small, small)))).verdict == FitStatus.fits),
        default=0.0,
    )  # fmt: skip
    assert estimate(job, found).time.step <= best * 1.01


def test_weights_are_the_least_whole_numbers() -> None:
    assert round_shard_weights([2.0, 1.0], [1, 2]) == (2, 1, 1)
    assert Plan(dp_shard=3, zero=3, shard_weights=round_shard_weights([1.5, 0.75], [1, 2])).name == "dp3.z3.zw2-1-1"
