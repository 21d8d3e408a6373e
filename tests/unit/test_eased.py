"""Of the optimizer's states no more than must be wait elsewhere."""

from __future__ import annotations

import pytest
from jobs import cluster, decoder, named_job, small_job

from meshwright.base.errors import InputError
from meshwright.cost.constants import HOST_UPDATE, OVERLAP_SLOWDOWN
from meshwright.cost.step import estimate
from meshwright.search.eased import SAFE, STEP
from meshwright.search.rank import search
from meshwright.spec.plan import parse_plan


def test_the_search_keeps_as_many_states_on_the_device_as_leave_the_same_margin() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    best = search(job, top=1).plans[0]
    whole = estimate(job, best.plan.but(offload_share=100))
    safe = [
        share
        for share in range(STEP, 101, STEP)
        if SAFE.index(estimate(job, best.plan.but(offload_share=share)).verdict) >= SAFE.index(whole.verdict)
    ]
    assert best.plan.offload_share == min(safe) < 100
    assert best.estimate.time.step < whole.time.step
    assert best.estimate == estimate(job, best.plan)


def test_what_waits_and_what_stays_of_a_share_are_all_of_the_states() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    here = estimate(job, parse_plan("dp1"))
    for share in (1, 25, 99):
        found = estimate(job, parse_plan(f"dp1.off-optimizer{share}"))
        assert found.offloaded == pytest.approx(here.memory.optimizer * share / 100)
        assert found.memory.optimizer == pytest.approx(here.memory.optimizer * (1 - share / 100))


def test_of_a_share_of_the_weights_the_rest_is_on_the_device() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    here, away = (estimate(job, parse_plan(f"dp8.z3{way}")) for way in ("", ".off-parameters"))
    for share in (1, 25, 99):
        found = estimate(job, parse_plan(f"dp8.z3.off-parameters{share}"))
        assert found.offloaded == pytest.approx(here.memory.parameters * share / 100)
        assert found.memory.parameters == pytest.approx(here.memory.parameters * (1 - share / 100))
        assert here.time.step < found.time.step < away.time.step


def test_the_search_keeps_as_many_weights_on_the_device_as_leave_the_same_margin() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    job = job.but(pins={"offload": ("parameters",), "zero": 3, "tp": 1, "pp": 1, "recompute": "none", "micro_batch": 1})
    tight = job.but(cluster=job.cluster.but(budget=0.999 * estimate(job, parse_plan("dp8.z3")).memory.total))
    best = search(tight, top=1).plans[0]
    whole = estimate(tight, best.plan.but(offload_share=100))
    safe = [
        share
        for share in range(STEP, 101, STEP)
        if SAFE.index(estimate(tight, best.plan.but(offload_share=share)).verdict) >= SAFE.index(whole.verdict)
    ]
    assert best.plan.offload_share == min(safe) < 100
    assert best.estimate == estimate(tight, best.plan)


def test_a_pinned_share_is_searched_where_it_means_something_and_refused_elsewhere() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    found = search(job.but(pins={"offload_share": 80}), top=1).plans[0]
    assert found.plan.offload_share == 80 and found.estimate == estimate(job, found.plan)
    with pytest.raises(InputError, match="a share is of the optimizer's states"):
        search(job.but(pins={"offload_share": 80, "offload": ("activations",)}), top=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp1.off-optimizer0", "greater than or equal to 1"),
        ("dp1.off-activations.off-activations-files", "names activations twice"),
        ("dp1.z3.off-optimizer50.off-parameters", "leave the share or one of the two out"),
    ],
)
def test_a_share_that_means_nothing_is_one_line(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_plan(name)


@pytest.mark.parametrize(("link", "longest", "others"), [(1e12, 1 / HOST_UPDATE, 4e-12), (1e9, 2e-9, 2e-9 + 1 / HOST_UPDATE)])
def test_the_ways_down_and_up_are_beside_the_update_of_the_host_and_slow_the_longest_of_the_three(
    link: float, longest: float, others: float
) -> None:
    on = cluster(1, 1)
    job = small_job(decoder(((4, 512),), hidden=256), on.but(groups=(on.groups[0].but(host_bandwidth=link, host_memory=1e9),)))
    assert estimate(job, parse_plan("dp1.off-optimizer")).time.offload == pytest.approx(
        (longest + OVERLAP_SLOWDOWN * others) * job.model.parameters, rel=1e-3
    )


def test_weights_in_files_come_up_over_the_link_too() -> None:
    on = cluster(1, 1)
    fast, slow = (
        small_job(
            decoder(((4, 512),), hidden=256),
            on.but(groups=(on.groups[0].but(host_bandwidth=link, host_memory=1e9, storage_bandwidth=1e9),)),
        )
        for link in (1e12, 1e7)
    )
    near, far = (estimate(job, parse_plan("dp1.z3.off-parameters-files")).time.offload for job in (fast, slow))
    bytes_up = 2 * fast.model.parameters * 2
    assert far - near > 0.9 * bytes_up * fast.workload.batch / 1e7
