"""Unlike groups of nodes: the plan found is that of pricing every plan by itself, and uses each group by its speed and
memory."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from jobs import cluster, decoder, device, small_job

from meshwright.core.errors import InputError
from meshwright.planner.cost.constants import PINNED_MEMORY_OVERHEAD
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.named_plans import complete_plan
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate
from meshwright.planner.search import uneven_batches, uneven_micro_batch
from meshwright.planner.search.advice import advise, rank_improvements
from meshwright.planner.search.best_plans import RISK_MARGIN, RankedPlan, plan_family, risk_adjusted_seconds
from meshwright.planner.search.heterogeneous import heterogeneous_plans
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.uneven_batches import split_micro_batches
from meshwright.spec.constraints import plan_violations
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan


def unlike_job(slower: float = 2.0, less: float = 1.0, batch: int = 8, blocks: int = 4) -> Job:
    """Two nodes of two devices, the second with 1 / `slower` of the speed and 1 / `less` of the memory."""
    model = decoder(((blocks, 512),), hidden=256, heads=4)
    on = cluster(1, 2, 64e6)
    first = on.groups[0]
    slow = device(
        64e6 / less, bandwidth=2e12 / slower, peak={name: rate / slower for name, rate in first.device.peak.items()}
    )
    return small_job(model, on.but(groups=(first, first.but(device=slow))), batch, sequence=512)


def score(job: Job, plan: Plan) -> float | None:
    found = estimate(job, plan)
    return risk_adjusted_seconds(job, plan, found) if found.fits else None


def every_pipeline(job: Job) -> list[Plan]:
    """1f1b over both groups, every cut of the blocks, one by one."""
    names = []
    blocks = job.model.blocks
    layouts = [
        ("dp2.", 2, "0-1"),
        ("dp2.", 2, "1-0"),
        ("", 4, "0-0-1-1"),
        ("", 4, "1-1-0-0"),
        ("tp2.", 2, "0-1"),
        ("tp2.", 2, "1-0"),
    ]
    cuts = {2: [(at, blocks - at) for at in range(1, blocks)], 4: [(1, 1, 1, 1)] if blocks == 4 else []}
    for head, pp, on in layouts:
        for cut in cuts[pp]:
            for parallel in ("", "sp.") if head == "tp2." else ("",):
                for size in (1, 2, 4, 8):
                    for again in ("", "rc-full."):
                        for zero in ("", "z1.", "z2.", "z3.") if head == "dp2." else ("",):
                            split = "-".join(map(str, cut))
                            names.append(f"{head}{parallel}pp{pp}.{zero}mb{size}.ls{split}.{again}place{on}")
    plans = [complete_plan(job, parse_plan(name)) for name in names]
    return [plan for plan in plans if not any(plan_violations(job, plan))]


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("less", [1.0, 2.0])
@pytest.mark.parametrize("blocks", [3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.covering(1)
def test_the_best_pipeline_over_two_groups_is_that_of_brute_force(slower: float, less: float, blocks: int) -> None:
    job = unlike_job(slower, less, blocks=blocks)
    expected = min(found for plan in every_pipeline(job) if (found := score(job, plan)) is not None)
    both = [found for found, plan in heterogeneous_plans(job, 100) if len(set(plan.placement)) == 2]
    assert min(both) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("less", [1.0, 2.0])
def test_a_ceiling_omits_no_better_pipeline_over_groups(less: float) -> None:
    job = unlike_job(3.0, less)
    every = heterogeneous_plans(job, 100)
    across = [(score, plan.name) for score, plan in every if len(set(plan.placement)) > 1]
    for ceiling, _ in across:
        found = {plan.name for _, plan in heterogeneous_plans(job, 100, ceiling=ceiling)}
        assert {name for score, name in across if score <= ceiling} <= found
    assert across and heterogeneous_plans(job, 100, ceiling=every[0][0] / 2) == []


def heavy_job(slower: float, batch: int) -> Job:
    """With a model that devices, not their hosts, take their time for."""
    job, model = unlike_job(slower, batch=batch), decoder(((8, 8192),), hidden=2048, heads=4)
    return job.but(model=model, cluster=job.cluster.with_memory(64e9), workload=job.workload.but(sequence=2048))


def test_a_faster_group_holds_more_blocks() -> None:
    job = heavy_job(slower=3.0, batch=16)
    best = next(plan for _, plan in heterogeneous_plans(job, 100) if len(set(plan.placement)) == 2)
    held = {
        group: sum(count for count, on in zip(best.layers_per_stage, best.placement, strict=True) if on == group)
        for group in (0, 1)
    }
    assert held[0] > held[1]


def test_a_group_that_only_slows_is_left_out() -> None:
    answer = search_plans(unlike_job(slower=50.0))
    assert set(answer.chosen.plan.placement) == {0}
    assert search_plans(unlike_job(slower=50.0), 1, runnable=True).chosen.plan.world == 4
    assert answer.chosen.estimate.notes == ("the devices of test are not used",)


def test_equal_groups_are_one() -> None:
    assert heterogeneous_plans(unlike_job(slower=1.0), 10) == []


def test_a_placement_that_leaves_part_of_a_group_is_explained() -> None:
    with pytest.raises(InputError, match=r"1 pipeline ranks of 1 devices need 1 devices of group 0, which has 2"):
        estimate(unlike_job(), parse_plan("pp2.ls2-2.place0-1"))


def every_share(job: Job, plan: Plan) -> list[Plan]:
    """`plan` with its micro-batches shared out in every way."""
    count, dp = job.workload.batch // plan.micro_batch, plan.dp
    cuts = combinations(range(1, count), dp - 1)
    ways = [tuple(after - before for before, after in zip((0, *cut), (*cut, count), strict=True)) for cut in cuts]
    return [plan.but(shares=way) for way in ways if len(set(way)) > 1]


@pytest.mark.parametrize(
    ("name", "slower"), [pytest.param("dp4", 1.7, marks=pytest.mark.soak), ("dp4.z1", 3.0), ("dp2.tp2.z1", 1.7)]
)
def test_the_best_shares_of_a_plan_are_those_of_brute_force(name: str, slower: float) -> None:
    job, plan = heavy_job(slower, batch=8), parse_plan(name)
    times = {each.shares: estimate(job, each).time.step for each in every_share(job, plan)}
    count, each = job.workload.batch // plan.micro_batch, []
    for replica in range(plan.dp):
        group = replica * 2 // plan.dp
        alone = job.cluster.but(groups=(job.cluster.groups[group].but(nodes=2),))
        parts = (
            CostModel(job.but(cluster=alone))
            .price(grid_of_plan(plan.but(shares=(count - plan.dp + 1, *(1,) * (plan.dp - 1))), 8, 8))
            .seconds
        )
        each.append(parts.each.max().item())
    assert times[split_micro_batches(count, each, [0.0] * plan.dp)] == pytest.approx(min(times.values()), rel=1e-12)


def test_faster_replicas_take_more_and_all_end_together() -> None:
    job = heavy_job(slower=3.0, batch=64)
    found = [plan for _, plan in uneven_batches.uneven_batch_plans(job, 5)]
    assert found and all(sum(plan.shares) * plan.micro_batch == 64 for plan in found)
    best = next(plan for plan in found if plan.dp == 4)
    assert min(best.shares[:2]) > max(best.shares[2:])
    assert estimate(job, best).time.step < estimate(job, best.but(shares=())).time.step


def test_shares_on_equal_devices_cost_what_the_largest_does() -> None:
    job = small_job(on=cluster(1, 2), batch=8)
    uneven, even = (estimate(job, parse_plan(name)) for name in ("dp2.ga5-3", "dp2"))
    whole_batch = estimate(job.but(workload=job.workload.but(batch=10)), parse_plan("dp2"))
    assert uneven.time.step == pytest.approx(whole_batch.time.step)
    assert uneven.memory == whole_batch.memory
    assert uneven.time.step > even.time.step


def test_a_search_of_what_runs_offers_shares_on_unlike_groups() -> None:
    job = heavy_job(slower=3.0, batch=64)
    chosen = search_plans(job, 1, runnable=True).chosen
    assert chosen.runs and chosen.plan.shares


@pytest.mark.parametrize(("less", "batch"), [(1.0, 16), pytest.param(2.0, 8, marks=pytest.mark.soak), (0.25, 16)])
def test_no_ranked_plan_is_better_than_what_is_said_to_be_the_best_of_its_family(less: float, batch: int) -> None:
    """Plans over unlike groups and plans that recompute some of their blocks stand among the families too."""
    answer = search_plans(unlike_job(3.0, less, batch))
    best = {family.name: family.seconds for family in answer.families if family.fits}
    for entry in answer.plans:
        assert best[plan_family(entry.plan)] <= entry.estimate.time.step * (1 + RISK_MARGIN)
    assert answer.chosen.plan in [family.plan for family in answer.families]


def every_size(job: Job, layouts: tuple[str, ...]) -> list[Plan]:
    """Every size of micro-batches on each of the two groups, and all numbers of them, evenly inside of a group."""
    batch, found = job.workload.batch, []
    for layout in layouts:
        plain = parse_plan(layout)
        half = plan_dp // 2 if (plan_dp := plain.dp) > 1 else 1
        each = [size for size in range(1, batch) if batch % size == 0 and batch // size >= plan_dp]
        for pair in product(each, each):
            for counts in product(range(half, batch), range(half, batch)):
                if sum(count * size for count, size in zip(counts, pair, strict=True)) != batch or pair[0] == pair[1]:
                    continue
                shares_of = [count // half + (at < count % half) for count in counts for at in range(half)]
                if plain.zero > 1 and len(set(shares_of)) > 1:
                    continue
                found.append(
                    plain.but(
                        micro_batch=max(pair),
                        micro_batch_sizes=[size for size in pair for _ in range(half)],
                        shares=shares_of if len(set(shares_of)) > 1 else (),
                    )
                )
    return [plan for plan in found if not any(plan_violations(job, plan))]


LAYOUTS = ("dp4", "dp4.z1", "dp2.tp2.z1", "dp4.z1.rc-full", "dp4.z3.rc-full", "dp2.tp2.z2")


def with_less(job: Job, less: float) -> Job:
    """The second group with so much less memory."""
    first, last = job.cluster.groups
    return job.but(
        cluster=job.cluster.but(groups=(first, last.but(device=last.device.but(memory=last.device.memory / less))))
    )


@pytest.mark.parametrize(
    ("slower", "less", "batch"), [(2.5, 1.0, 10), pytest.param(1.7, 8.0, 12, marks=pytest.mark.soak), (3.0, 12.0, 8)]
)
def test_no_other_sizes_beat_the_result_by_more_than_the_threshold(slower: float, less: float, batch: int) -> None:
    job = with_less(heavy_job(slower, batch), less)
    best = min(score for score, _ in uneven_batches.uneven_batch_plans(job, 50))
    expected = [found for plan in every_size(job, LAYOUTS) if (found := score(job, plan)) is not None]
    assert best * uneven_micro_batch.MAX_UNEVEN_STEP_RATIO <= min(expected) * (1 + 1e-9)


def test_slow_replicas_take_smaller_micro_batches_where_one_size_is_too_coarse() -> None:
    job = heavy_job(2.5, 10).but(model=decoder(((8, 8192),), hidden=2048, heads=1))  # one head: no tensor ranks
    best = min(uneven_batches.uneven_batch_plans(job, 5), key=lambda pair: pair[0])[1]
    assert best.name == "dp4.z1.mb2-2-1-1.ga2-2-1-1"


def test_a_group_with_less_memory_takes_smaller_micro_batches() -> None:
    job = with_less(heavy_job(1.0, 64), 8.0)
    best = min(uneven_batches.uneven_batch_plans(job, 5), key=lambda pair: pair[0])[1]
    assert best.name == "dp4.z1.mb16-16-2-2.ga1-1-8-8"
    assert estimate(job, best).fits and not estimate(job, parse_plan("dp4.z1.mb16")).fits


@pytest.mark.parametrize("batches", [range(10, 20), pytest.param(range(20, 41), marks=pytest.mark.soak)], ids=str)
def test_whole_numbers_of_micro_batches_of_any_sizes_end_as_early_as_can_be(batches: range) -> None:
    """Brute force over three kinds: sums that no numbers reach, and the least end of those that some do."""
    kinds = [
        uneven_micro_batch.GroupMicroBatches(2, 4, 3.0, 0.5),
        uneven_micro_batch.GroupMicroBatches(1, 3, 2.5, 0.1),
        uneven_micro_batch.GroupMicroBatches(3, 1, 2.0, 0.0),
    ]
    for batch in batches:
        ends = [
            max(-(-total // kind.replicas) * kind.each + kind.once for total, kind in zip(totals, kinds, strict=True))
            for totals in product(*(range(kind.replicas, batch + 1) for kind in kinds))
            if sum(total * kind.size for total, kind in zip(totals, kinds, strict=True)) == batch
        ]
        end, counts = uneven_micro_batch.split_batch_exactly(kinds, batch)
        assert end == pytest.approx(min(ends, default=float("inf")))
        assert not counts or sum(sum(held) * kind.size for held, kind in zip(counts, kinds, strict=True)) == batch


def test_micro_batches_count_where_a_slow_link_rounds_their_seconds_away() -> None:
    """Beside 1e9 seconds once, a millisecond more is no number: the count of micro-batches went on for ever."""
    _, counts = uneven_micro_batch.split_batch_exactly(
        [uneven_micro_batch.GroupMicroBatches(1, 4, 1e-3, 1e9), uneven_micro_batch.GroupMicroBatches(1, 1, 2e-3, 1e9)],
        11,
    )
    assert sum(counts[0]) * 4 + sum(counts[1]) == 11


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        pytest.param("dp4.tp2.place0", [1, 3, 9], [3, 9], marks=pytest.mark.soak),
        ("dp2.pp4.place0-0-0-0", [3, 9], [1, 3, 9]),
    ],
)
def test_advice_names_the_degrees_beside_one_that_does_not_divide_all_devices(
    name: str, tensor: list[int], pipeline: list[int]
) -> None:
    """Nine devices, of which the plan uses eight; no even plan of nine is legal for a batch of eight."""
    job, plan = unlike_job(), parse_plan(name)
    first, last = job.cluster.groups
    job = job.but(cluster=job.cluster.but(groups=(first.but(devices=8), last.but(devices=1))))
    answer = search_plans(job, 1).but(plans=(RankedPlan(plan=plan, estimate=estimate(job, plan)),))
    said = advise(job, answer)[5].fields
    assert [it.fields["degree"] for it in said["tensor"]] == tensor and [
        it.fields["degree"] for it in said["pipeline"]
    ] == pipeline


def test_what_an_improvement_brings_is_said_where_the_chosen_plan_has_shares() -> None:
    job = heavy_job(slower=3.0, batch=16)
    chosen = search_plans(job, 1, runnable=True).chosen
    assert chosen.plan.shares
    found = {it.name: it.speed for it in rank_improvements(job, chosen.estimate.time.step, True, chosen.plan)}
    single = ["memory", "compute", "links", "network", "batch"]
    assert set(single) <= found.keys() and min(found[name] for name in single) >= 1 - RISK_MARGIN


@pytest.mark.parametrize("plan", ["dp4.rc-full.off-optimizer", "dp4.rc-full.off-optimizer.ga1-1-3-3"])
def test_what_waits_on_hosts_counts_on_unlike_groups_as_on_equal_ones(plan: str) -> None:
    job = unlike_job(less=0.5)
    first, second = (group.but(host_memory=1e9, host_bandwidth=1e10) for group in job.cluster.groups)
    job = job.but(cluster=job.cluster.but(groups=(first, second)))
    poor = job.but(cluster=job.cluster.but(groups=(first, second.but(host_memory=2e6))))
    roomy, crowded = (estimate(each, parse_plan(plan)) for each in (job, poor))
    assert roomy.fits and not roomy.crowded and roomy.offloaded == crowded.offloaded > 1e6
    assert (
        not crowded.fits
        and crowded.crowded == pytest.approx(crowded.offloaded - 1e6 / PINNED_MEMORY_OVERHEAD)
        and crowded.spare == roomy.spare
    )
    assert (
        "to its host, but the host has only 678.2 KiB for each device: the largest offload that fits is off-optimizer"
        in crowded.notes[-1]
    )
