"""Traces the collectives and messages of all ranks of a plan, one rank after another in one process, on the paths of
NCCL. All ranks train equal rows with constant weights, so all ranks have equal values, and a rank computes alone what
it would receive: a sum is its own value times the number of ranks."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from recording_backend import recording_device
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.graph import ModelGraph
from meshwright.models import moe
from meshwright.models.registry import build_reference_model
from meshwright.runtime.comm import group as comm_group
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.plan import Plan
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.invariants import StepInvariants
from meshwright.train.trainer import Trainer, parallelize

Communicator = tuple[tuple[int, ...], int]
"""The ranks of a communicator, and its number among those with these ranks, in the order of creation."""


@dataclass(frozen=True)
class Call:
    """A collective, or a message. `what`: what the ranks of the communicator, or both ends of a message, agree on.
    `pair`: the sender and the receiver of a message. `splits`: the elements to each rank and from each rank, of an
    all-to-all."""

    group: Communicator
    what: tuple[Any, ...]
    pair: tuple[int, int] | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass
class RankTrace:
    """What one rank does, in order: the process groups that it creates, its own and others, and its launches. A launch
    is one collective, one message, or messages that start together. `header`: the content of messages that state a
    shape (runtime/pipeline/p2p.py). `setup`: CPU seconds of `parallelize`. `trains`: whether the
    set-up has ended."""

    rank: int
    world: int
    header: torch.Tensor
    created: list[tuple[int, ...]] = field(default_factory=list)
    launches: list[list[Call]] = field(default_factory=list)
    groups: dict[dist.ProcessGroup, Communicator] = field(default_factory=dict)
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    setup: float = 0.0
    trains: bool = False

    def __post_init__(self) -> None:
        self.counts[tuple(range(self.world))] = 1  # the default group

    def new_group(self, ranks: Sequence[int] | None, *arguments: Any, **more: Any) -> Any:
        every = tuple(range(self.world)) if ranks is None else tuple(ranks)
        made = CREATE(ranks, *arguments, **more)
        if isinstance(made, dist.ProcessGroup):
            self.groups[made] = (every, self.counts[every])
        self.counts[every] += 1
        self.created.append(every)
        return made

    def start_together(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        before = len(self.launches)
        for each in operations:
            each.op(each.tensor, each.peer, each.group)
        self.launches[before:] = [list(itertools.chain(*self.launches[before:]))]
        return [Complete()]


class Complete(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class TracedGroup(dist.ProcessGroup):
    """Records the calls of one rank."""

    def __init__(self, trace: RankTrace, index: int, size: int) -> None:
        super().__init__(index, size)
        self.trace, self.index, self.count = trace, index, size

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def launch(self, kind: str, sizes: Any, tensor: torch.Tensor, **more: Any) -> dist.Work:
        group = self.trace.groups.get(self, (tuple(range(self.trace.world)), 0))
        self.trace.launches.append([Call(group, (kind, sizes, tensor.dtype), **more)])
        return Complete()

    def multiply(self, tensor: torch.Tensor, operation: Any) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(self.count)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        self.multiply(tensors[0], options.reduceOp)
        return self.launch("all-reduce", tensors[0].numel(), tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return self.launch("broadcast", (tensors[0].numel(), options.rootRank), tensors[0])

    def barrier(self, options: Any = None) -> dist.Work:
        return self.launch("barrier", 0, torch.empty(0))

    def allgather(self, out: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        for each in out[0]:
            each.view(-1)[: tensors[0].numel()].copy_(tensors[0].view(-1)[: each.numel()])
        assert out[0][self.index].numel() == tensors[0].numel()
        return self.launch("all-gather", tuple(each.numel() for each in out[0]), tensors[0])

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> dist.Work:
        out.view(self.count, -1).copy_(tensor.reshape(1, -1).clone())
        return self.launch("all-gather", tensor.numel(), tensor)

    def gather(self, out: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        for each in out[0] if out else ():
            each.copy_(tensors[0])
        return self.launch("gather", (tensors[0].numel(), options.rootRank), tensors[0])

    def reduce_scatter(self, out: list[torch.Tensor], full: list[list[torch.Tensor]], options: Any = None) -> dist.Work:
        out[0].copy_(full[0][self.index])
        self.multiply(out[0], options.reduceOp)
        return self.launch("reduce-scatter", tuple(each.numel() for each in full[0]), out[0])

    def reduce_scatter_single(self, out: torch.Tensor, full: torch.Tensor, options: Any = None) -> dist.Work:
        out.copy_(full.view(self.count, *out.shape)[self.index].clone())
        self.multiply(out, options.reduceOp)
        return self.launch("reduce-scatter", out.numel(), out)

    def alltoall_base(
        self, out: torch.Tensor, full: torch.Tensor, incoming: list[int], outgoing: list[int], options: Any = None
    ) -> dist.Work:
        incoming, outgoing = ([*rows] or [len(each) // self.count] * self.count for rows, each in (
            (incoming, out), (outgoing, full),
        ))  # fmt: skip
        own = full.split(outgoing)[self.index]
        for each in out.split(incoming):
            each.zero_()[: len(own)].copy_(own[: len(each)])
        width = full[:1].numel() or out[:1].numel()
        return self.launch("all-to-all", width, full, splits=(tuple(outgoing), tuple(incoming)))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self.message(tensors[0], self.index, to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        states_shape = tensors[0].dtype == torch.int64 and tensors[0].shape[1:] == self.trace.header.shape
        tensors[0].copy_(self.trace.header) if states_shape else tensors[0].fill_(0.01)
        return self.message(tensors[0], source, self.index)

    def message(self, tensor: torch.Tensor, source: int, to: int) -> dist.Work:
        ranks = dist.get_process_group_ranks(self)
        return self.launch("message", tensor.numel(), tensor, pair=(ranks[source], ranks[to]))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


CREATE = distributed_c10d._new_group_with_tag
TRACES: list[RankTrace] = []
dist.Backend.register_backend(
    "traced", lambda store, index, size, timeout: TracedGroup(TRACES[-1], index, size), devices=["cpu"]
)


@contextmanager
def traced_rank(rank: int, world: int, header: Sequence[int] = ()) -> Iterator[RankTrace]:
    """Inside the context, this process is one rank of a job on devices with streams and NCCL."""
    trace = RankTrace(rank, world, torch.tensor([*header, *[0] * (8 - len(header))]))
    TRACES.append(trace)
    try:
        with (
            recording_device(),
            mock.patch.object(comm_group, "uses_nccl", lambda backends, device: True),
            mock.patch.object(distributed_c10d, "_new_group_with_tag", trace.new_group),
            mock.patch.object(dist, "batch_isend_irecv", trace.start_together),
            mock.patch.object(StepInvariants, "check"),  # its sums are 0 only over different ranks
            mock.patch.object(GradReducer, "sync_unused", lambda reducer, seen: setattr(reducer, "unused", ())),
            mock.patch.object(moe.MoeRouter, "forward", balanced_router),
        ):
            dist.init_process_group("traced", store=dist.HashStore(), rank=rank, world_size=world)
            yield trace
    finally:
        TRACES.pop()
        dist.destroy_process_group()


SEQUENCE, HIDDEN = 16, 16
ROUTE = moe.MoeRouter.forward


def balanced_router(router: moe.MoeRouter, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives all experts the same number of tokens in training. Before, checks compare routes under other shapes."""
    if not TRACES[-1].trains:
        return ROUTE(router, hidden)
    scores = F.linear(hidden, router.weight)
    index = torch.arange(len(hidden) * router.top_k).view(-1, router.top_k) % len(router.weight)
    return scores.gather(1, index).softmax(-1), index


@functools.cache
def graph_of(kind: str, layers: int, experts: int = 8) -> ModelGraph:
    return analyze_model(constant_model(kind, layers, experts), use_random_weights=True)


def constant_model(kind: str, layers: int, experts: int = 8) -> nn.Module:
    """A model of `kind` ('llama', 'tied' or 'mixture') whose shards are equal on all ranks."""
    sizes: dict[str, Any] = {"layers": layers, "hidden": HIDDEN, "heads": 8, "kv_heads": 8, "ffn": 32, "vocab": 64}
    if kind == "mixture":
        sizes |= {"kind": "decoder", "experts": experts, "top_k": 2, "moe_ffn": 32}
    model = build_reference_model({**sizes, "seq": SEQUENCE, "tied": kind == "tied"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.02 if parameter.ndim > 1 else 1.0)
    return model


def trace(
    plan: Plan, kind: str, ranks: Iterable[int], steps: int = 2, micro_batches: int | None = None
) -> list[RankTrace]:
    """Returns what `ranks` of the plan do in the set-up and in `steps` steps (`trained_rank`)."""
    found = []
    for rank in ranks:
        with trained_rank(plan, kind, rank, micro_batches) as (record, trainer, batch):
            for _ in range(steps):
                trainer.step(batch)
        found.append(record)
    return found


@contextmanager
def trained_rank(
    plan: Plan,
    kind: str,
    rank: int,
    micro_batches: int | None = None,
    precision: str = "fp32",
    is_whole: bool = True,
    inside: Iterable[Callable[[], AbstractContextManager[Any]]] = (),
) -> Iterator[tuple[RankTrace, Trainer, Any]]:
    """Yields the trace of one rank after its set-up, a trainer without checks, and a batch. Each replica has
    `micro_batches`, by default two for each pipeline rank and two more. `is_whole`: whether the batch is the global one
    instead of the rows of a replica. `inside`: contexts of set-up and steps."""
    size = (kind, max(2, plan.stages * (1 + plan.recompute_layers)), max(8, plan.ep))
    graph = graph_of(*size)
    shape = (plan.micro_batch, SEQUENCE // plan.cp // (plan.tp if plan.sequence_parallel else 1), HIDDEN)
    micro_batches = micro_batches or 2 * plan.pp + 2 * (plan.pp > 1)
    rows = (sum(plan.shares) or plan.dp * micro_batches) * plan.micro_batch
    batch: Any = {name: torch.arange(SEQUENCE).repeat(rows, 1) for name in ("input_ids", "labels")}
    if not is_whole:
        part = {name: value[: plan.micro_batch] for name, value in batch.items()}
        batch = LocalBatch([part] * micro_batches, rows * (SEQUENCE - 1))
    with traced_rank(rank, plan.world, (1 if precision == "fp32" else 2, 3, *shape)) as record, ExitStack() as stack:
        for each in inside:
            stack.enter_context(each())
        model, began = constant_model(*size), time.process_time()
        made = parallelize(model, still, plan, precision=precision, anatomy=graph, clip=1.0, prove="never")
        record.setup, record.trains = time.process_time() - began, True
        made.engine.preflight.skip()
        made.engine.preflight.analysed = None
        yield record, made, batch
        made.close()


def still(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that leaves the weights equal."""
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


def differences(traces: Sequence[RankTrace]) -> list[str]:
    """Returns where ranks create groups in different orders, or disagree about a call of a communicator."""
    found = [f"groups of rank {each.rank}" for each in traces if each.created != traces[0].created]
    calls: dict[Any, dict[int, list[Call]]] = {}
    for each in traces:
        for call in itertools.chain(*each.launches):
            calls.setdefault((call.group, call.pair), {}).setdefault(each.rank, []).append(call)
    known = {each.rank for each in traces}
    for (group, pair), by_rank in calls.items():
        members = known.intersection(pair or group[0])
        sequences = {rank: [call.what for call in by_rank.get(rank, ())] for rank in members}
        first = min(members)
        if others := [rank for rank in members if sequences[rank] != sequences[first]]:
            steps = enumerate(itertools.zip_longest(sequences[first], sequences[others[0]]))
            number, calls_of = next((number, both) for number, both in steps if both[0] != both[1])
            found.append(f"{pair or group}: call {number} of ranks {first} and {others}: {calls_of}")
            continue
        for same in zip(*by_rank.values(), strict=True) if pair is None else ():
            for one, other in itertools.combinations(zip(by_rank, same, strict=True), 2):
                found += [f"{group}: rows {one[0]}, {other[0]}"] * (not exchanges_equal(group[0], one, other))
    return found


def exchanges_equal(ranks: Sequence[int], one: tuple[int, Call], other: tuple[int, Call]) -> bool:
    """Returns whether two ranks send each other in an all-to-all as much as the other expects."""
    if one[1].splits is None or other[1].splits is None:
        return one[1].splits == other[1].splits
    at, to = ranks.index(one[0]), ranks.index(other[0])
    return one[1].splits[0][to] == other[1].splits[1][at] and one[1].splits[1][to] == other[1].splits[0][at]


def stuck(traces: Sequence[RankTrace]) -> list[str]:
    """Returns the ranks that wait forever if every launch waits until all its ranks are there, and the launch where
    each of them waits. Empty if and only if one order of all launches of all ranks exists that contains the order of
    each rank. Then no sharing of streams, queues or threads can make ranks wait for each other."""
    known = {each.rank for each in traces}
    arrived: dict[Any, list[RankTrace]] = {}
    at = {each.rank: -1 for each in traces}
    counts: dict[int, dict[Any, int]] = {each.rank: {} for each in traces}
    missing = dict.fromkeys(known, 0)
    ready = list(traces)
    while ready:
        rank = ready.pop()
        at[rank.rank] += 1
        if at[rank.rank] == len(rank.launches):
            continue
        calls = rank.launches[at[rank.rank]]
        missing[rank.rank] = len(calls)
        for call in calls:
            key = (call.group, call.pair)
            counts[rank.rank][key] = number = counts[rank.rank].get(key, 0) + 1
            there = arrived.setdefault((key, number), [])
            there.append(rank)
            if len(there) == len(known.intersection(call.pair or call.group[0])):
                for each in there:
                    missing[each.rank] -= 1
                    ready += [each] * (not missing[each.rank])
    return [
        f"rank {each.rank}: {each.launches[at[each.rank]]}" for each in traces if at[each.rank] < len(each.launches)
    ]
