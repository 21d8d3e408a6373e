"""Of the optimizer's states no more than must be wait elsewhere."""

from __future__ import annotations

import itertools
import json

import pytest
from jobs import cluster, decoder, named_job, small_job

from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError
from meshwright.planner.cost.constants import CPU_UPDATE_PARAMS_PER_SECOND, OVERLAP_SLOWDOWN, PINNED_MEMORY_OVERHEAD
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.best_plans import SearchObjective
from meshwright.planner.search.feasibility import OFFLOAD_FRACTION_PINS
from meshwright.planner.search.ranking import FIT_STATUS_ORDER, FRACTION_STEP_PERCENT, search_plans
from meshwright.spec.constraints import plan_violations
from meshwright.spec.job import Job
from meshwright.spec.layout import ALIGN_NUMEL
from meshwright.spec.plan import Plan, parse_plan

LINES = 34 * ALIGN_NUMEL
"""Elements that wait beyond a share at most, of 34 units, of each of which whole lines wait."""


def test_the_search_keeps_as_many_states_on_the_device_as_leave_the_same_margin() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16", reduce="bf16")
    best = search_plans(job, top=1).plans[0]
    whole = estimate(job, best.plan.but(offload_share=100))
    safe = [
        share
        for share in range(FRACTION_STEP_PERCENT, 101, FRACTION_STEP_PERCENT)
        if FIT_STATUS_ORDER.index(estimate(job, best.plan.but(offload_share=share)).verdict)
        >= FIT_STATUS_ORDER.index(whole.verdict)
    ]
    assert best.plan.offload_share == min(safe) < 100
    assert best.estimate.time.step < whole.time.step
    assert best.estimate == estimate(job, best.plan)


def test_what_waits_and_what_stays_of_a_share_are_all_of_the_states() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    here = estimate(job, parse_plan("dp1"))
    for share in (1, 25, 99):
        found = estimate(job, parse_plan(f"dp1.off-optimizer{share}"))
        assert 0 <= found.offloaded - here.memory.optimizer * share / 100 < LINES * 12
        assert found.offloaded + found.memory.optimizer == here.memory.optimizer


def test_of_a_share_of_the_weights_the_rest_is_on_the_device() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    here, away = (estimate(job, parse_plan(f"dp8.z3{way}")) for way in ("", ".off-parameters"))
    for share in (1, 25, 99):
        found = estimate(job, parse_plan(f"dp8.z3.off-parameters{share}"))
        assert 0 <= found.offloaded - here.memory.parameters * share / 100 < LINES * 2
        assert found.offloaded + found.memory.parameters == here.memory.parameters
        assert here.time.step < found.time.step < away.time.step


def test_the_search_keeps_as_many_weights_on_the_device_as_leave_the_same_margin() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    job = job.but(pins={"offload": ("parameters",), "zero": 3, "tp": 1, "pp": 1, "recompute": "none", "micro_batch": 1})
    tight = job.but(cluster=job.cluster.but(budget=0.999 * estimate(job, parse_plan("dp8.z3")).memory.total))
    best = search_plans(tight, top=1).plans[0]
    whole = estimate(tight, best.plan.but(weights_share=100))
    safe = [
        share
        for share in range(FRACTION_STEP_PERCENT, 101, FRACTION_STEP_PERCENT)
        if FIT_STATUS_ORDER.index(estimate(tight, best.plan.but(weights_share=share)).verdict)
        >= FIT_STATUS_ORDER.index(whole.verdict)
    ]
    assert best.plan.weights_share == min(safe) < 100 and best.plan.offload_share == 100
    assert best.estimate == estimate(tight, best.plan)


def two_ways(precision: str = "bf16", fits: str = "dp1.z3.off-optimizer80.off-parameters40") -> Job:
    """A device whose budget is what a plan with shares of its own takes."""
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, precision)
    job = job.but(pins={"offload": ("optimizer", "parameters"), "recompute": "full", "micro_batch": 1})
    groups = tuple(group.but(host_memory=1e12, host_bandwidth=1e11) for group in job.cluster.groups)
    job = job.but(cluster=job.cluster.but(groups=groups))
    priced = estimate(job, parse_plan(f"{fits}.rc-full.mb1"))
    return job.but(cluster=job.cluster.but(budget=priced.memory.reserved * 1.001))


@pytest.mark.parametrize(
    ("precision", "fits"),
    [
        pytest.param("bf16", "dp1.z3.off-optimizer.off-parameters40", marks=pytest.mark.soak),
        ("fp32", "dp1.z3.off-optimizer60.off-parameters60"),
    ],
)
def test_of_states_and_weights_that_both_wait_the_quickest_pair_of_shares_is_taken(precision: str, fits: str) -> None:
    job = two_ways(precision, fits)
    best = search_plans(job, top=1).chosen
    whole = estimate(job, best.plan.but(offload_share=100, weights_share=100))
    priced = {}
    for states, weights in itertools.product(range(FRACTION_STEP_PERCENT, 101, FRACTION_STEP_PERCENT), repeat=2):
        plan = best.plan.but(offload_share=states, weights_share=weights)
        if not any(plan_violations(job, plan)):
            found = estimate(job, plan)
            if FIT_STATUS_ORDER.index(found.verdict) >= FIT_STATUS_ORDER.index(whole.verdict):
                priced[states, weights] = found.time.step
    assert best.estimate.time.step == pytest.approx(min(priced.values()), rel=1e-9)
    assert best.estimate == estimate(job, best.plan) and best.estimate.time.step < whole.time.step
    assert min(best.plan.offload_share, best.plan.weights_share) < 100


def test_a_share_of_its_own_of_states_and_of_weights_is_of_each_what_waits() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    here, states, weights, both = (
        estimate(job, parse_plan(f"dp8.z3{way}"))
        for way in ("", ".off-optimizer60", ".off-parameters30", ".off-optimizer60.off-parameters30")
    )
    assert both.offloaded == states.offloaded + weights.offloaded
    assert both.memory.optimizer == states.memory.optimizer and both.memory.parameters == weights.memory.parameters
    assert 0 <= 0.4 * here.memory.optimizer - both.memory.optimizer < LINES * 12
    assert 0 <= 0.7 * here.memory.parameters - both.memory.parameters < LINES * 2
    assert max(states.time.step, weights.time.step) < both.time.step < states.time.step + weights.time.step


def test_weights_whose_states_stay_go_down_after_the_update() -> None:
    """Of 30 hundredths of the states and 50 of the weights the states of 20 are updated on the device, and these
    weights wait on the host."""
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    alone, both = (
        estimate(job, parse_plan(f"dp1.z3{way}")) for way in (".off-optimizer30", ".off-optimizer30.off-parameters50")
    )
    weights = (
        estimate(job, parse_plan("dp1.z3.off-optimizer50.off-parameters50")).time.offload
        - estimate(job, parse_plan("dp1.z3.off-optimizer50")).time.offload
    )
    down = 0.2 * job.model.parameters * 2 / job.cluster.host_bandwidth
    assert both.time.offload - alone.time.offload - weights == pytest.approx(down, rel=1e-3)


def test_a_host_without_room_is_told_the_shares_that_have_it() -> None:
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    plan = parse_plan("dp8.z3.off-optimizer80.off-parameters40")
    wanted = estimate(job, plan).offloaded
    small = job.but(
        cluster=job.cluster.but(
            groups=tuple(group.but(host_memory=4.001 * wanted * PINNED_MEMORY_OVERHEAD) for group in job.cluster.groups)
        )
    )
    priced = estimate(small, plan)
    assert not priced.fits and priced.notes[-1].endswith(
        "the largest offload that fits is off-optimizer40.off-parameters20 in the plan name"
    ), priced.notes
    assert estimate(small, parse_plan("dp8.z3.off-optimizer40.off-parameters20")).crowded == 0


@pytest.mark.parametrize(
    "objective", [pytest.param(SearchObjective.fastest, marks=pytest.mark.soak), SearchObjective.headroom]
)
@pytest.mark.parametrize(
    "pins", [{"offload_share": 50}, pytest.param({"offload_share": 50, "weights_share": 40}, marks=pytest.mark.soak)]
)
def test_who_pins_a_share_gets_plans_in_which_that_waits_whatever_the_objective(
    pins: dict[str, int], objective: SearchObjective
) -> None:
    """For the most headroom nothing waits unless it is asked for: the pin was passed over in silence."""
    job = named_job("llama-7b", "1x8:a100-80gb", 8, 2048, "bf16", pins=pins)
    plans = [entry.plan for entry in search_plans(job, top=3, objective=objective).plans]
    assert plans and all(
        getattr(plan, name) == share and waits(plan.offload)
        for plan in plans
        for (name, share) in pins.items()
        for waits in [OFFLOAD_FRACTION_PINS[name]]
    )


def test_a_share_of_what_has_nowhere_to_wait_is_refused() -> None:
    with pytest.raises(InputError, match=r"pin weights_share=40: nothing can be offloaded: .*storage_bandwidth"):
        job = named_job("llama-7b", "1x8:cpu", 64, 2048, "fp32", pins={"weights_share": 40})
        search_plans(
            job.but(
                cluster=job.cluster.but(groups=tuple(group.but(storage_bandwidth=0) for group in job.cluster.groups))
            )
        )


def test_a_plan_of_before_whose_share_was_of_the_weights_loads() -> None:
    before = {"zero": 3, "dp_shard": 2, "offload": ["parameters-disk"], "offload_share": 50}
    assert validate_data(Plan, before).name == "dp2.z3.off-parameters-disk50"
    job = named_job("llama-7b", "1x8:a100-80gb", 64, 2048, "bf16")
    pins = {"offload": ("parameters",), "offload_share": 50, "recompute": "full", "micro_batch": 1}
    old, new = (
        search_plans(job.but(pins=each), top=1) for each in (pins, {**pins, "offload_share": 100, "weights_share": 50})
    )
    assert [entry.name for entry in old.plans] == [
        entry.name for entry in new.plans
    ] and "off-parameters50" in old.chosen.name


@pytest.mark.parametrize(
    "name",
    [
        "dp2.z3.off-optimizer60.off-parameters50",
        "dp2.z2.off-optimizer-disk60.off-gradients",
        "dp1.z3.off-optimizer.off-parameters-disk5",
    ],
)
def test_a_name_with_shares_reads_back(name: str) -> None:
    plan = parse_plan(name)
    assert plan.name == name and validate_data(Plan, json.loads(plan.to_json())) == plan


def test_in_fp32_on_a_device_at_least_as_many_states_wait_as_weights() -> None:
    """There the weights are what is updated; on cores, whose memory is the host's, and where float32 weights stay, any
    two shares go together."""
    device = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "fp32")
    with pytest.raises(InputError, match=r"percentage of states must be at least that of the weights \(50, not 40\)"):
        estimate(device, parse_plan("dp1.z3.off-optimizer40.off-parameters50"))
    estimate(device, parse_plan("dp1.z3.off-optimizer50.off-parameters50"))
    estimate(
        named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16"), parse_plan("dp1.z3.off-optimizer40.off-parameters50")
    )
    with pytest.raises(InputError, match="percentage of states must be at least that of the weights"):
        search_plans(
            device.but(pins={"offload": ("optimizer", "parameters"), "offload_share": 40, "weights_share": 50}), top=1
        )


def test_a_pinned_share_is_searched_where_it_means_something_and_refused_elsewhere() -> None:
    job = named_job("llama-7b", "1x1:a100-80gb", 64, 2048, "bf16")
    found = search_plans(job.but(pins={"offload_share": 80}), top=1).plans[0]
    assert found.plan.offload_share == 80 and found.estimate == estimate(job, found.plan)
    with pytest.raises(InputError, match="offload_share needs offload of optimizer states"):
        search_plans(job.but(pins={"offload_share": 80, "offload": ("activations",)}), top=1)
    with pytest.raises(InputError, match="weights_share needs offload of weights"):
        search_plans(job.but(pins={"weights_share": 80, "offload": ("optimizer",)}), top=1)
    both = search_plans(job.but(pins={"offload_share": 80, "weights_share": 20}), top=1).chosen.plan
    assert (both.offload_share, both.weights_share) == (80, 20) and {"optimizer", "parameters"} <= set(both.offload)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp1.off-optimizer0", "greater than or equal to 1"),
        ("dp1.off-activations.off-activations-disk", "names activations twice"),
        ("dp1.off-optimizer50.off-optimizer-disk60", "sets offload_share a second time"),
    ],
)
def test_a_share_that_means_nothing_is_one_line(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_plan(name)


@pytest.mark.parametrize(
    ("link", "longest", "others"),
    [(1e12, 1 / CPU_UPDATE_PARAMS_PER_SECOND, 6e-12), (1e9, 4e-9, 2e-9 + 1 / CPU_UPDATE_PARAMS_PER_SECOND)],
)
def test_host_link_transfers_overlap_the_cpu_update_and_slow_the_longest(
    link: float, longest: float, others: float
) -> None:
    """Gradients of 4 bytes go to the host, weights of 2 bytes come back."""
    on = cluster(1, 1)
    job = small_job(
        decoder(((4, 512),), hidden=256), on.but(groups=(on.groups[0].but(host_bandwidth=link, host_memory=1e9),))
    )
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
    near, far = (estimate(job, parse_plan("dp1.z3.off-parameters-disk")).time.offload for job in (fast, slow))
    bytes_up = 2 * fast.model.parameters * 2
    assert far - near > 0.9 * bytes_up * fast.workload.batch / 1e7
