"""Ranks of one host exchange through memory that they share: the same sums as over gloo, in the same order on every
rank, and an end of one is an error of the others, not their silence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from world_group import world_comm_group

from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import quiesce_groups
from meshwright.runtime.comm.shm.collectives import MAX_INFLIGHT_COLLECTIVES, ONE_SHOT_MAX_BYTES
from meshwright.runtime.comm.shm.memory import SharedMemory, ShmSegment, shm_host_id
from meshwright.runtime.pipeline.p2p import RING_SLOTS, P2PKey, ShmP2P, make_p2p
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.action import ActionKind

SIZES = (1, 17, ONE_SHOT_MAX_BYTES // 4, ONE_SHOT_MAX_BYTES // 4 + 3, 200_000)


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank * 1000 + size)).to(dtype)


def sums(dtype: torch.dtype, shared: bool) -> list[torch.Tensor]:
    """Sums and largest of all parts, and this rank's slice of a sum beside all slices gathered."""
    group, results = world_comm_group(shared), []
    assert (group.shm is not None) == shared
    for size in SIZES:
        total, largest = part(group.index, size, dtype), part(group.index, size, dtype)
        async_collectives.all_reduce(total, group).wait()
        async_collectives.all_reduce(largest, group, use_max=True).wait()
        full = part(group.index, size * group.size, dtype)
        own, gathered = torch.empty(size, dtype=dtype), torch.empty_like(full)
        async_collectives.reduce_scatter(full, own, group).wait()
        async_collectives.all_gather(gathered, own, group).wait()
        results += [total, largest, gathered]
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_sums_in_order_of_rank_whatever_the_size(ranks: Pool, world: int, dtype: torch.dtype) -> None:
    results = ranks.run(world, sums, dtype, True)
    for size, (total, largest, gathered) in zip(SIZES, zip(*[iter(results[0])] * 3, strict=True), strict=True):
        parts = [part(rank, size, dtype) for rank in range(world)]
        precise = [each.float() if dtype == torch.bfloat16 else each for each in parts]
        wanted = precise[0] + precise[1] if world == 2 else precise[0] + precise[1] + precise[2]
        assert torch.equal(total, wanted.to(dtype))
        assert torch.equal(largest, torch.stack(parts).amax(0))
        whole = [part(rank, size * world, dtype).to(torch.float64) for rank in range(world)]
        assert torch.allclose(
            gathered.double(), sum(whole[1:], whole[0]), atol=0.05 if dtype == torch.bfloat16 else 1e-5
        )
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_over_gloo_the_sums_are_the_same_to_rounding(ranks: Pool) -> None:
    for ours, theirs in zip(
        ranks.run(2, sums, torch.float64, True)[0], ranks.run(2, sums, torch.float64, False)[0], strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-14, atol=1e-14)


def in_flight() -> list[float]:
    """More collectives begun than there are lanes, on memory of growing size, finished late; and again in place in
    shared memory."""
    mesh = make_parallel_context(Plan(tp=dist.get_world_size()))
    group, host = mesh.world, mesh.shared_memory
    assert group is not None and host is not None
    plain = [torch.full((1 << (10 + at % 12),), float(group.index + at)) for at in range(2 * MAX_INFLIGHT_COLLECTIVES)]
    pending = [async_collectives.all_reduce(each, group) for each in plain]
    for each in pending:
        each.wait()
    placed = host.zeros(100_000, torch.float32)
    found = []
    for turn in range(5):
        quiesce_groups([group])
        placed.fill_(group.index + turn)
        async_collectives.all_reduce(placed, group).wait()
        found.append(placed.unique().item())
    return [each.unique().item() for each in plain] + found


def test_more_collectives_than_lanes_and_memory_in_place_keep_their_values(ranks: Pool) -> None:
    for found in ranks.run(3, in_flight):
        assert found == [3.0 + 3 * at for at in range(2 * MAX_INFLIGHT_COLLECTIVES)] + [
            3.0 + 3 * turn for turn in range(5)
        ]


def messages(count: int) -> list[bool]:
    """Rank 0 sends hidden states, rank 1 their gradients; each takes them two by two in turned order."""
    mesh = make_parallel_context(Plan(pp=2))
    wire = make_p2p(mesh)
    assert isinstance(wire, ShmP2P)
    kind, other = (ActionKind.F, ActionKind.B) if mesh.rank == 0 else (ActionKind.B, ActionKind.F)
    right = []
    for pair in range(count // 2):
        for number in (2 * pair, 2 * pair + 1):
            wire.send([torch.full((number % 5 + 1, 3), float(number))], P2PKey(kind, 1, number), 1 - mesh.rank, ())
        for number in (2 * pair + 1, 2 * pair):
            (got,) = wire.receive(P2PKey(other, 1, number), 1, 1 - mesh.rank)
            right.append(got.shape == (number % 5 + 1, 3) and bool((got == number).all()))
    return right


def test_messages_arrive_by_name_in_any_order_and_their_places_are_used_again(ranks: Pool) -> None:
    for right in ranks.run(2, messages, 3 * RING_SLOTS):
        assert len(right) == 3 * RING_SLOTS and all(right)


@pytest.fixture
def neighbour() -> Iterator[tuple[int, int]]:
    """Process and file of the words of another process, which does nothing."""
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        words = ShmSegment(1 << 16, 0)
        os.write(tell, str(words.fd).encode())
        while True:
            signal.pause()
    os.close(tell)
    file = int(os.read(told, 16))
    os.close(told)
    yield process, file
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def hosted(neighbour: tuple[int, int], timeout: float) -> SharedMemory:
    words = ShmSegment(1 << 16, 0)
    return SharedMemory(0, words, {0: (os.getpid(), words.fd), 1: neighbour}, timeout)


def test_a_dropped_segment_gives_its_memory_and_its_file_back(neighbour: tuple[int, int]) -> None:
    host = hosted(neighbour, timeout=60.0)
    before = len(os.listdir("/proc/self/fd"))
    segment = host.segment(1 << 20)
    assert len(os.listdir("/proc/self/fd")) > before
    host.drop(segment)
    del segment
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_ends_is_named_by_those_who_wait_for_it(neighbour: tuple[int, int]) -> None:
    host = hosted(neighbour, timeout=60.0)
    os.kill(neighbour[0], signal.SIGKILL)  # not waited for: a zombie has ended too
    with pytest.raises(ConnectionError, match="closed by rank 1: its process ended"):
        host.wait_for_field(1, 3, 1)


def test_a_rank_that_is_silent_is_named_after_the_timeout(neighbour: tuple[int, int]) -> None:
    with pytest.raises(ConnectionError, match="rank 1 did not answer within 0 s"):
        hosted(neighbour, timeout=0.2).wait_for_field(1, 3, 1)


def test_ranks_in_other_network_namespaces_are_on_other_hosts() -> None:
    assert os.readlink("/proc/self/ns/net") in shm_host_id()


def test_the_switch_leaves_shared_memory_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_SHARED", "0")
    assert shm_host_id() == ""
