"""Ranks on several hosts: each host sends a sum once, and what comes out is what one device computes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality import alone, anatomy_of, check, made, make_batch, make_model, make_optimizer, train
from hosts import hosts
from pool import Pool
from world_group import between_hosts

from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.comm.topology import HierarchicalGroup
from meshwright.runtime.zero.group_weights import GroupWeights
from meshwright.spec.plan import Plan, parse_plan
from meshwright.train.trainer import parallelize

SIZES = (1, 3, 17, 40_001)


def part(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank * 1000 + size), dtype=torch.float64)


def world(each: int) -> CommGroup:
    with hosts(each):
        group = make_parallel_context(Plan(tp=dist.get_world_size())).world
    assert group is not None
    return group


def sums(each: int) -> tuple[bool, list[torch.Tensor]]:
    """Whether there are tiers; sums, largest and slices of sums, gathered, of all sizes, all under way at once."""
    group, results, pending = world(each), [], []
    for size in SIZES:
        total, largest = part(group.index, size), part(group.index, size)
        full, own = part(group.index, size * group.size), torch.empty(size, dtype=torch.float64)
        gathered, mine = torch.empty_like(full), part(group.index, size)
        pending += [
            async_collectives.all_reduce(total, group),
            async_collectives.all_gather(gathered, mine, group),
            async_collectives.reduce_scatter(full, own, group),
            async_collectives.all_reduce(largest, group, use_max=True),
        ]
        results += [total, largest, own, gathered]
    for each_one in pending:
        each_one.wait()
    async_collectives.all_to_all(
        out := torch.empty(group.size), torch.full((group.size,), float(group.index)), group
    ).wait()
    return isinstance(group.shm, HierarchicalGroup), [*results, out]


@pytest.mark.parametrize(("ranks_in_all", "each"), [pytest.param(6, 2, marks=pytest.mark.soak), (6, 3), (4, 1)])
def test_collectives_between_hosts_give_what_flat_ones_give(ranks: Pool, ranks_in_all: int, each: int) -> None:
    results = ranks.run(ranks_in_all, sums, each)
    for rank, (tiered, found) in enumerate(results):
        assert tiered == (each > 1)
        for size, (total, largest, own, gathered) in zip(SIZES, zip(*[iter(found[:-1])] * 4, strict=True), strict=True):
            parts = torch.stack([part(other, size) for other in range(ranks_in_all)])
            assert torch.allclose(total, parts.sum(0), rtol=1e-13, atol=1e-13)
            assert torch.equal(total, results[0][1][4 * SIZES.index(size)]), "ranks hold unlike sums"
            assert torch.equal(largest, parts.amax(0))
            wholes = torch.stack([part(other, size * ranks_in_all) for other in range(ranks_in_all)]).sum(0)
            assert torch.allclose(own, wholes[rank * size : (rank + 1) * size], rtol=1e-13, atol=1e-13)
            assert torch.equal(gathered, parts.view(-1))
        assert torch.equal(found[-1], torch.arange(float(ranks_in_all)))


@functools.cache
def expected() -> dict[str, Any]:
    return alone("llama", "fp64", 2)


def on_hosts(plan: str, each: int) -> dict[str, Any]:
    with hosts(each):
        return train("llama", plan, "fp64", 2)


@pytest.mark.parametrize(
    "plan",
    [
        "dp4.z3",
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in ("dp4", "dp2x2.z1", "dp2.tp2.z2.mb2", "dp2.cp2.z1.mb2")
        ),
    ],
)
def test_a_plan_over_two_hosts_computes_what_one_device_computes(ranks: Pool, plan: str) -> None:
    check(expected(), ranks.run(parse_plan(plan).world, on_hosts, plan, 2), "fp64")


@pytest.mark.soak
@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize(
    "plan",
    ["dp8", "dp8.z1", "dp8.z2", "dp8.z3", "dp2x4.z3", "dp4x2.z1", "dp4.tp2.z2.mb2", "dp2.pp2.cp2.z3", "dp2.tp4.mb2"],
)
def test_a_plan_over_several_hosts_computes_what_one_device_computes(ranks: Pool, plan: str, each: int) -> None:
    check(expected(), ranks.run(8, on_hosts, plan, each), "fp64")


def kinds_of_a_step(plan: str) -> tuple[list[str], list[str]]:
    with between_hosts():
        trainer = parallelize(make_model("gpt2"), make_optimizer, plan, anatomy=anatomy_of("gpt2"))
        record = trainer.step(make_batch("gpt2", 0))
    return sorted(record.exposed), sorted(record.sent)


@pytest.mark.parametrize("plan", ["pp3.mb2", pytest.param("pp4.mb2", marks=pytest.mark.soak)])
def test_ranks_between_the_ends_of_a_tie_name_the_same_kinds_as_those_ends(ranks: Pool, plan: str) -> None:
    """Records are agreed on number by number: one kind more on some ranks and they do not meet."""
    found = ranks.run(int(plan[2]), kinds_of_a_step, plan)
    assert all(each == found[0] for each in found) and "data" in found[0][1]


class Hour:
    """An event of a stream that stands still for 1,000 s at every wait."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1e6


def by_events(plan: str) -> tuple[dict[str, float], float]:
    with between_hosts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WaitTimer, "of", lambda device: WaitTimer(Hour))
        trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
        record = trainer.step(make_batch("llama", 0))
    return record.exposed, record.seconds


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("dp2.tp2.z3", {"data", "tensor"}),
        ("pp2.mb4", {"pipeline"}),
        pytest.param("dp2.cp2.z1", {"data", "context"}, marks=pytest.mark.soak),
        ("dp1.off-optimizer", {"offload"}),
    ],
)
def test_every_wait_of_a_stream_is_timed_by_its_events(ranks: Pool, plan: str, kinds: set[str]) -> None:
    """Where the host only says that the device is to wait, its own clock knows of none."""
    for exposed, seconds in ranks.run(parse_plan(plan).world, by_events, plan):
        assert {kind for kind, waited in exposed.items() if waited} == kinds and seconds < 1000.0
        assert all(waited % 1000.0 == 0.0 for waited in exposed.values())


def steps_between_hosts(name: str, plan: str, waits: bool) -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    """The losses of four steps and of an evaluation, how many groups are being gathered when each step returns, and the
    weights. `waits`: whether the update waits for them."""
    start = GroupWeights.all_gather_async
    at_once = lambda weights: (start(weights), weights.finish_gather())[0]
    with between_hosts(), mock.patch.object(GroupWeights, "all_gather_async", at_once if waits else start):
        trainer = parallelize(
            made(name, "fp32"), make_optimizer, parse_plan(plan).but(bucket=1), clip=1.0, anatomy=anatomy_of(name)
        )
        losses, pending = [], []
        for step in range(4):
            losses.append(trainer.step(make_batch(name, step), wait=False).loss)
            pending.append(sum(unit.weights.is_gathering for unit in trainer.engine.zero.units))
        losses.append(trainer.evaluate(make_batch(name, 99)))
        return losses, pending, trainer.full_state_dict()


@pytest.mark.parametrize(
    ("name", "plan"), [("llama", "dp2.z1"), pytest.param("llama-tied", "dp2.z2.mb1", marks=pytest.mark.soak)]
)
def test_weights_that_the_next_forward_gathers_train_to_equal_bits(ranks: Any, name: str, plan: str) -> None:
    overlapped, waiting = (ranks.run(2, steps_between_hosts, name, plan, waits) for waits in (False, True))
    for one, other in zip(overlapped, waiting, strict=True):
        assert one[0] == other[0] and min(one[1]) > 2 and not any(other[1])
        assert all(torch.equal(value, other[2][key]) for key, value in (one[2] or {}).items())
