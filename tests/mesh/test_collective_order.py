"""All ranks of a mesh call the collectives of each communicator in the same order with the same sizes, and no ranks
wait for each other in a circle. The ranks are traced on the paths of NCCL (traced_mesh.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
from traced_mesh import RankTrace, differences, stuck, trace

from meshwright.planner.cost.communicators import RankSplit, communicators
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.spec.grid import Coords, RankGrid
from meshwright.spec.plan import Plan, parse_plan

DENSE = """
dp64 dp64.mb2 dp64.z1 dp64.z2 dp64.z3 dp64.z3.rc-full dp8x8.z1 dp8x8.z2 dp8x8.z3 dp64x1.z1 dp64.z3.lc2
dp64.z1.off-optimizer dp64.z3.off-optimizer.off-parameters
dp8.tp8 dp8.tp8.sp dp8.tp8.sp.z1 dp8.tp8.sp.z3.rc-full dp16.tp4.sp.z2 dp2x8.tp4.sp.z3 dp8.tp8.sp.rc-sac.lc2
dp16.cp4 dp16.cp4.ulysses dp16.cp4.ulysses2 dp8.cp8.z3 dp2x4.cp8.z2 dp8.tp4.sp.cp2.z1 dp8.tp4.cp2.ulysses.z3
dp16.pp4 dp16.pp4.gpipe dp16.pp4.interleaved2 dp16.pp4.zbh1 dp16.pp4.zbv dp16.pp4.dualpipev
dp8.pp8.z1 dp8.pp8.zbv.z1 dp8.pp8.interleaved2.z2 dp16.pp4.z3 dp32.pp2.dualpipev
dp4.tp4.sp.pp4.z1 dp2x2.tp2.sp.pp4.cp2.z1 dp4.tp2.pp4.cp2.ulysses.z2.rc-full dp4.tp4.sp.pp4.interleaved2.z3
dp4.tp4.pp4.zbv.order-dp-pp-tp tp8.sp.pp8 dp2.tp2.cp4.pp4.dualpipev.z1
"""
TIED = "dp16.pp4 dp8.tp2.sp.pp4.z1 dp16.pp4.interleaved2 dp16.pp4.zbv dp64.z3"
MIXTURE = """
dp64.ep8 dp64.ep8.z1 dp64.ep8.z2 dp64.ep8.z3 dp8x8.ep8.z3 dp16.tp4.sp.ep4 dp16.pp4.ep4.z1 dp16.pp4.zbv.ep8
dp16.pp4.ep8.z2.dualpipev dp8.tp2.sp.pp4.ep4.interleaved2.z1 dp32.tp2.ep8.z2
"""
PLANS = [
    (kind, plan) for kind, plans in (("llama", DENSE), ("tied", TIED), ("mixture", MIXTURE)) for plan in plans.split()
]
SAMPLE = [("mixture", "dp64.ep8.z3")]


@pytest.mark.parametrize(
    ("kind", "plan"), [pytest.param(*case, marks=[pytest.mark.soak] * (case not in SAMPLE)) for case in PLANS]
)
def test_all_64_ranks_call_each_collective_in_one_order_without_a_circle_of_waits(kind: str, plan: str) -> None:
    parsed = parse_plan(plan)
    assert parsed.world == 64
    traces = trace(parsed, kind, range(64))
    assert all(each.launches for each in traces)
    assert differences(traces) == [] and stuck(traces) == []


COUNTED = "dp64.z3 dp64x1.z1 dp8.tp8.sp dp16.cp4.ulysses2 dp2x2.tp2.sp.pp4.cp2.z1 dp16.pp4.zbv dp16.pp4 dp32.tp2.ep8.z2"
"""Plans of 64 ranks whose communicators are counted outside of the soak."""


@pytest.mark.parametrize(
    ("kind", "plan"),
    [pytest.param(*case, marks=[pytest.mark.soak] * (case[1] not in COUNTED.split())) for case in PLANS],
)
def test_the_estimate_counts_the_communicators_that_a_rank_uses(kind: str, plan: str) -> None:
    """Of the first and the last rank, with their numbers of ranks and the distances of neighbours. NCCL creates a
    communicator when a process group first transfers a tensor."""
    parsed = parse_plan(plan)
    box = grid_of_plan(parsed, parsed.dp * parsed.micro_batch * 2 * parsed.pp, 4 * parsed.stages)
    tied = kind == "tied" and parsed.pp > 1 and not parsed.schedule_rules.v_shape
    split = RankSplit(int(box.contexts[0]), int(box.ulysses_ranks[0]), parsed.sequence_parallel)
    counted = communicators(box.layout, box.shards[0], split, tied=tied)
    expected = sorted((each.ranks, each.stride, each.peers > 0) for each in counted)
    for each in trace(parsed, kind, (0, parsed.world - 1), steps=1):
        sends: dict[Any, bool] = {}
        for call in chain(*each.launches):
            sends[call.group] = sends.get(call.group, False) or call.what[0] in ("message", "all-to-all")
        used = [(len(ranks), min(b - a for a, b in pairwise(sorted(ranks))), sends[ranks, at]) for ranks, at in sends]
        assert sorted(used) == expected


@pytest.fixture(scope="module")
def small() -> list[RankTrace]:
    return trace(parse_plan("dp2.tp2.sp.pp2.interleaved2.z3"), "llama", range(8), steps=1)


def test_a_call_that_one_rank_leaves_out_is_found(small: list[RankTrace]) -> None:
    """Each launch of rank 5 is left out once."""
    assert differences(small) == [] and stuck(small) == []
    whole = small[5].launches
    for at in range(len(whole)):
        small[5].launches = whole[:at] + whole[at + 1 :]
        found = differences(small)
        small[5].launches = whole
        assert found, f"nobody misses {whole[at]}"


def test_two_calls_in_the_wrong_order_on_one_rank_are_found(small: list[RankTrace]) -> None:
    """Each pair of consecutive launches of rank 5 changes places once. If the pair has one communicator and differs,
    ranks disagree; if another rank makes both launches too, they wait for each other."""
    whole, other, checked = small[5].launches, small[4].launches, 0
    for at, (one, two) in enumerate(pairwise(whole)):
        same_group = one[0].group == two[0].group and one[0].pair == two[0].pair
        shared = not same_group and any(
            one[0].group == a[0].group and two[0].group == b[0].group for a, b in pairwise(other)
        )
        if (same_group and one == two) or not (same_group or shared):
            continue
        small[5].launches = [*whole[:at], two, one, *whole[at + 2 :]]
        found = differences(small) or stuck(small)
        small[5].launches = whole
        checked += 1
        assert found, f"nobody notices {two} before {one}"
    assert checked > 20


def program(trace: RankTrace, grid: RankGrid) -> list[Any]:
    """Returns the calls of a rank with each communicator and each peer relative to the rank's own coordinates."""
    own = grid.place(trace.rank)
    shapes: dict[Any, Any] = {}

    def relative(ranks: tuple[int, ...]) -> Any:
        if ranks not in shapes:
            places = [grid.place(rank) for rank in ranks]
            lowest = Coords(*map(min, zip(*places, strict=True)))
            shapes[ranks] = hash(
                tuple(tuple(one - low for one, low in zip(place, lowest, strict=True)) for place in places)
            )
        return shapes[ranks]

    def distance(rank: int) -> tuple[int, ...]:
        return tuple((to - at) % size for to, at, size in zip(grid.place(rank), own, grid.sizes, strict=True))

    return [
        [(relative(call.group[0]), call.group[1], call.what, tuple(map(distance, call.pair or ()))) for call in launch]
        for launch in trace.launches
    ]


def programs_by_states(traces: list[RankTrace], plan: Plan) -> dict[tuple[int, int], list[list[Any]]]:
    """Returns by pipeline coordinate and shard of the states the different programs of these ranks."""
    grid, found = RankGrid(plan), dict[tuple[int, int], list[list[Any]]]()
    for each in traces:
        known = found.setdefault((grid.place(each.rank).pp, grid.holding(each.rank)[1]), [])
        one = program(each, grid)
        known += [one] * (one not in known)
    return found


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", "dp2x2.tp2.sp.z1"),
        pytest.param("llama", "dp2x2.tp2.sp.pp4.cp2.z1", marks=pytest.mark.soak),
        pytest.param("llama", "dp16.tp4.sp.interleaved2.pp2.z3", marks=pytest.mark.soak),
        pytest.param("mixture", "dp8.tp2.sp.pp4.ep4.interleaved2.z1", marks=pytest.mark.soak),
    ],
)
def test_the_calls_of_a_rank_depend_on_its_stages_and_its_shard_alone(kind: str, plan: str) -> None:
    """So some tensor ranks, context ranks and replicas represent the others (`sampled_ranks`)."""
    parsed = parse_plan(plan)
    traces = trace(parsed, kind, range(parsed.world), steps=1)
    found = programs_by_states(traces, parsed)
    assert {key: len(programs) for key, programs in found.items()} == dict.fromkeys(found, 1)
    assert len(found) == parsed.pp * parsed.shards and differences(traces) == []


LARGE = """
llama3-405b      1024 llama   dp4x128.tp2.sp.z3.rc-sac.off-activations
llama3-70b       1024 llama   dp4x128.cp2.z3.rc-full12+sac
qwen3-235b-a22b  1024 mixture dp4x256.z3.mb4.rc-full
gpt3-175b        1024 tied    dp16.tp4.sp.pp8.cp2.z1.mb3.interleaved12
mt-nlg-530b      1024 tied    dp16.tp8.sp.pp8.z1.interleaved13
mixtral-8x22b    1024 mixture dp8x4.pp4.cp8.ep8.z1.interleaved14
nemotron4-340b   4096 llama   dp16x128.tp2.sp.z3.mb2.rc-sac.off-activations
gpt-1t-sc21      4096 tied    dp32.tp8.sp.pp16.z1.interleaved8
deepseek-v3      4096 mixture dp2x16.pp32.cp4.ep8.z1
llama3-405b      4096 llama   dp2x4.tp4.sp.pp32.cp4.z1.zbv
"""
"""The planner's first plan that this version runs (`meshwright plan --runnable`) for large models of the catalogue on
128 or 512 nodes of 8 h100-80gb or a100-80gb, with the world size and the kind of `constant_model` that is traced."""


def sampled_ranks(plan: Plan) -> list[int]:
    """Returns all pipeline ranks of the first rank, and of the first and the last rank the lines along each axis: all
    ranks of a line if these are at most 8, else the first three, the middle one and the last one. If the states are
    sharded over more ranks, a tensor rank beside each of these too, as both reduce what their shard has in common."""
    grid, found = RankGrid(plan), {*RankGrid(plan).along(0, "pp")}
    for end in (0, plan.world - 1):
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            line = grid.along(end, axis)
            ranks = {*line} if len(line) <= 8 else {*line[:3], line[len(line) // 2], line[-1]}
            found |= ranks.union(*(grid.along(rank, "tp")[:2] for rank in ranks if axis == "dp_shard"))
    return sorted(found)


def most_groups(plan: Plan, kind: str) -> int:
    """Returns the largest number of communicators of a rank: at most 5 for data, tensor and pipeline parallelism (all
    ranks, and an axis each of pp, tp, shards and replicas), the one of tied weights, 3 of context ranks and 5 of
    experts."""
    axes = (plan.pp, plan.tp, plan.shards, plan.state_replicas)
    return 1 + sum(size > 1 for size in axes) + (kind == "tied") + 3 * (plan.cp > 1) + 5 * (plan.ep > 1)


@pytest.mark.parametrize(
    ("world", "kind", "name"),
    [
        pytest.param(int(world), kind, plan, id=f"{model}-{world}", marks=[pytest.mark.soak] * (at > 0))
        for at, (model, world, kind, plan) in enumerate(map(str.split, LARGE.strip().splitlines()))
    ],
)
def test_sampled_ranks_of_a_large_mesh_call_each_collective_in_one_order(
    world: int, kind: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    """Traces `sampled_ranks` in the set-up and one step of as many micro-batches as pipeline ranks. All rules of the
    64-rank meshes hold for the calls of these ranks among each other. The plan is the planner's. The model is small, so
    that nothing large is allocated: one block for each virtual stage (one more than the blocks that the plan recomputes
    differently), a hidden size of 16, as many experts as expert ranks, at least 8."""
    plan = parse_plan(name)
    assert plan.world == world
    traces = trace(plan, kind, sampled_ranks(plan), steps=1, micro_batches=plan.pp)
    assert all(each.launches for each in traces)
    assert differences(traces) == [] and stuck(traces) == []
    assert all(len(programs) == 1 for programs in programs_by_states(traces, plan).values())
    groups = max(len({call.group for call in chain(*each.launches)} | {*each.groups.values()}) for each in traces)
    setup = sorted(each.setup for each in traces)
    for what, value in {
        "ranks": len(traces), "groups of a rank": groups, "groups that a rank creates": len(traces[0].created),
        "CPU seconds of the set-up, median": setup[len(setup) // 2], "longest": setup[-1],
    }.items():  # fmt: skip
        record_property(what, value)
    assert groups <= most_groups(plan, kind)
    assert setup[-1] < LONGEST_SETUP


LONGEST_SETUP = 30.0
"""CPU seconds. With groups found by a search of all ranks for each rank, 4,096 ranks take minutes each."""
