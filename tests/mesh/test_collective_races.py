"""No collective and no message races with a kernel where each process group has a stream of its own, as NCCL has. The
check sees what it should: without any one of the waits that a step runs, it finds a race."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nccl_streams import nccl_streams
from race_detector import RaceDetector, detected_races
from traced_mesh import traced_rank, trained_rank

from meshwright.spec.layout import MIN_TENSOR_CHUNK_BYTES
from meshwright.spec.plan import parse_plan

OFFLOADED = "dp2.z3.off-optimizer.off-parameters.mb2", "dp2.z2.off-optimizer.off-gradients.mb2"
SAMPLE = "dp2.z2.mb2", "dp2.z3.mb1", "pp2"
PLANS = (
    *SAMPLE, "dp2.z1.mb2", "dp2.z1.mb1", "dp2.z2.mb1", "dp2.z3.mb2", "dp2x2.z1", "dp2x2.z3", *OFFLOADED,
    "tp2", "tp2.sp", "cp2", "cp2.ulysses", "pp2.interleaved2", "pp2.zbv", "pp2.dualpipev",
    "dp2.pp2.z3", "dp2.tp2.sp.z3", "dp2.ep2.z1", "dp2.ep2.z3",
)  # fmt: skip
EQUIVALENT = {
    # The reasons are those of test_stream_races.py: the host has waited for the copies of the gradients.
    *((plan, "wait_stream of offloaded.py:OffloadedShard.__init__") for plan in OFFLOADED),
    (OFFLOADED[0], "wait_event of param_swapper.py:CpuShard.release"),
    (OFFLOADED[1], "wait_stream of updater.py:apply_offloaded_update"),
}
"""Waits whose absence cannot be seen in a step of either rank, by plan. All are waits of offload, none of NCCL."""


def train(plan: str, rank: int, dropped: str = "", completes: bool = False) -> RaceDetector:
    """Trains three steps of one rank, or until a race. `completes`: a launch is complete when somebody asks."""
    found: list[RaceDetector] = []

    @contextmanager
    def streams() -> Iterator[None]:
        several_chunks = mock.patch.dict(MIN_TENSOR_CHUNK_BYTES, nccl=1, gloo=1)
        with several_chunks, detected_races(dropped) as detector, nccl_streams(detector, completes):
            found.append(detector)
            yield

    parsed = parse_plan(plan)
    kind = "mixture" if parsed.ep > 1 else "llama"
    with trained_rank(parsed, kind, rank, None, "bf16", False, [streams]) as (_, trainer, batch):
        for _ in range(3):
            if not found[0].races:
                trainer.step(batch)
    return found[0]


@pytest.mark.parametrize(
    "plan", [pytest.param(each, marks=[pytest.mark.soak] * (each not in SAMPLE)) for each in PLANS]
)
def test_no_collective_runs_without_an_order_and_each_wait_is_needed(plan: str) -> None:
    """Of the first and the last rank. A mutant is found if one of them has a race."""
    whole = {rank: train(plan, rank) for rank in (0, parse_plan(plan).world - 1)}
    assert all(each.races == set() and each.waits for each in whole.values())
    missed = {
        wait
        for wait in set().union(*(each.waits for each in whole.values()))
        if not any(wait in each.waits and train(plan, rank, wait).races for rank, each in whole.items())
    }
    assert missed == {wait for name, wait in EQUIVALENT if name == plan}


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["pp2", "pp2.zbv", "dp2.pp2.z3", "cp2"])
def test_no_message_races_if_it_is_complete_when_the_sender_asks(plan: str) -> None:
    for rank in (0, parse_plan(plan).world - 1):
        assert train(plan, rank, completes=True).races == set()


@contextmanager
def two_ranks() -> Iterator[RaceDetector]:
    with traced_rank(0, 2), detected_races() as detector, nccl_streams(detector):
        yield detector


def test_a_launch_uses_its_memory_until_the_current_stream_has_waited() -> None:
    with two_ranks() as detector:
        flat = torch.ones(8)
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        del flat  # the work references it
        work.wait()
        dist.all_reduce(torch.ones(8))  # in the current stream
        assert detector.races == set()
        dist.all_reduce(torch.ones(8), async_op=True)
        assert detector.races == {"the next owner in compute after allreduce in group 0"}


def test_a_launch_races_with_kernels_that_use_the_same_bytes_only() -> None:
    with two_ranks() as detector:
        flat = torch.ones(8)
        work = dist.all_reduce(flat[:4], async_op=True)
        assert work is not None
        flat[4:].add_(1.0)
        assert detector.races == set() and not work.is_completed()
        flat[3:].add_(1.0)
        assert detector.races == {"add_ in compute after allreduce in group 0"}
        work.wait()


def test_memory_of_a_storage_that_is_resized_is_freed_although_a_launch_references_it() -> None:
    with two_ranks() as detector:
        flat = torch.ones(8)
        work = dist.all_reduce(flat, async_op=True)
        flat.untyped_storage().resize_(0)
        assert detector.races == {"the next owner in compute after allreduce in group 0"} and work is not None


def test_messages_that_start_together_are_one_launch() -> None:
    with two_ranks() as detector:
        sent, received = torch.ones(4), torch.empty(4)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)])
        sent.sum()
        assert len(works) == 1 and detector.races == set()
        received.sum()
        assert detector.races == {"sum in compute after messages in group 0"}
        works[0].wait()
