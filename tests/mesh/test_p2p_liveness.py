"""Point-to-point messages of pipelines under the rules of NCCL: a batch of sends or receives occupies the stream of its
communicator until both ends of all its transfers have started, and streams share hardware queues. The programs are
recorded from the runner and `P2P`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.topology import Topology
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline import p2p, runner
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.action import Action, ActionKind, Receive, rank_programs
from meshwright.spec.schedules.schedule import offered_schedules

PARTS = 2
COMPUTE = "compute"
MESSAGES = "messages"
STREAMS = (COMPUTE, MESSAGES)
"""The streams of a rank: all messages have one, because the pipeline has one communicator."""


@dataclass
class Item:
    """A launch. `transfers`: the sender and the receiver of each tensor of a batch. `waits`: items that must end before
    it starts. `blocks`: whether the host waits until it ends. `left`: the number of transfers that have not ended."""

    stream: str
    transfers: list[tuple[int, int]] = field(default_factory=list)
    waits: list[Item] = field(default_factory=list)
    blocks: bool = False
    started: bool = False
    ended: bool = False
    left: int = 0


class Recorder:
    """Stands for torch.distributed in `P2P`, and records what a rank launches, as ProcessGroupNCCL would: a batch waits
    for the compute stream, and `Work.wait` makes the compute stream wait for the batch."""

    isend, irecv = "isend", "irecv"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.items: list[Item] = []
        self.last: dict[str, Item] = {}

    def launch(self, stream: str, *waits: Item, transfers: Sequence[tuple[int, int]] = ()) -> Item:
        before = [each for each in (self.last.get(stream), *waits) if each is not None]
        item = Item(stream, list(transfers), before)
        self.last[stream] = item
        self.items.append(item)
        return item

    def P2POp(self, op: str, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        return SimpleNamespace(op=op, tensor=tensor, peer=peer)

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        transfers = [(self.rank, each.peer) if each.op == "isend" else (each.peer, self.rank) for each in operations]
        item = self.launch(MESSAGES, *filter(None, [self.last.get(COMPUTE)]), transfers=transfers)
        if operations[0].op == "irecv" and operations[0].tensor.dtype == torch.int64:
            item.blocks = True  # the host reads the header
            operations[0].tensor[:, :4] = torch.tensor([1, 2, 1, 4])
        return [SimpleNamespace(wait=partial(self.launch, COMPUTE, item), is_completed=lambda: False)]


def record(plan: Plan, micro_batches: int, monkeypatch: pytest.MonkeyPatch, headers: bool = True) -> list[list[Item]]:
    """Returns what each pipeline rank launches in two steps. `headers`: whether the first step, in which headers are
    sent, is one of them."""
    found = []
    grid = RankGrid(plan)
    for rank in range(plan.pp):
        recorder = Recorder(rank)
        monkeypatch.setattr(p2p, "dist", recorder)
        weight, pipeline = torch.ones(1, 4, requires_grad=True), CommGroup(tuple(range(plan.pp)), rank)

        def forward(stage: int, batch: Any, received: Any, recorder: Recorder = recorder) -> tuple[torch.Tensor, ...]:
            recorder.launch(COMPUTE)
            output = [each * weight for each in received or [batch["x"]] * PARTS]  # noqa: B023
            return (sum(each.sum() for each in output),) if stage == plan.stages - 1 else tuple(output)

        made = runner.ScheduleRunner(
            ParallelContext(plan, Topology(grid, rank), torch.device("cpu"), {"pp": pipeline}),
            forward,
            lambda action, recorder=recorder: recorder.launch(COMPUTE) and None,  # type: ignore[misc]
            lambda stage: PARTS,
        )
        for step in range(3):
            if step == 1 and not headers:
                recorder.items, recorder.last = [], {}
            if step < 2 or not headers:
                made.run([{"x": torch.ones(1, 4)}] * micro_batches, 1.0)
        found.append(recorder.items)
    return found


def hangs(programs: Sequence[Sequence[Item]], queue_of: Callable[[str], Any], lazy: bool, blocking: bool) -> bool:
    """Returns whether ranks end up waiting for each other. `queue_of`: the hardware queue of a stream. Items of a queue
    start in the order of launch. `lazy`: the first transfer of two ranks blocks both hosts until both are there.
    `blocking`: the host waits for every launch (CUDA_LAUNCH_BLOCKING)."""
    for item in (item for program in programs for item in program):
        item.started, item.ended, item.left = False, False, len(item.transfers)
    queues: dict[Any, deque[Item]] = {}
    transfers: dict[Any, list[Item]] = {}
    launched, counts, arrived = [0] * len(programs), dict[Any, int](), dict[Any, set[int]]()
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while launched[rank] < len(program):
                item, previous = program[launched[rank]], program[launched[rank] - 1]
                if launched[rank] and (blocking or previous.blocks) and not previous.ended:
                    break
                if lazy and item.transfers:
                    for pair in item.transfers:
                        arrived.setdefault(pair, set()).add(rank)
                    if any(len(arrived[pair]) < 2 for pair in item.transfers):
                        break
                queues.setdefault((rank, queue_of(item.stream)), deque()).append(item)
                for pair in item.transfers:
                    at = counts[rank, pair] = counts.get((rank, pair), 0) + 1
                    transfers.setdefault((pair, at), []).append(item)
                launched[rank] += 1
                progress = True
        for queue in queues.values():
            while queue and all(each.ended for each in queue[0].waits):
                item = queue.popleft()
                item.started, item.ended, progress = True, not item.transfers, True
        for key, ends in list(transfers.items()):
            if len(ends) == 2 and all(each.started for each in ends):
                for each in ends:
                    each.left -= 1
                    each.ended = not each.left
                del transfers[key]
                progress = True
    return any(not item.ended for program in programs for item in program)


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to divide streams into queues: 2 for two streams."""
    if not items:
        yield []
        return
    for each in partitions(items[1:]):
        yield [[items[0]], *each]
        for at in range(len(each)):
            yield [*each[:at], [items[0], *each[at]], *each[at + 1 :]]


def count_hangs(programs: Sequence[Sequence[Item]], mappings: Sequence[list[list[str]]]) -> int:
    """Returns in how many of the `mappings` of streams to queues, each with eager and with lazy communicators, and in
    both with launches that block, the ranks hang."""
    found = 0
    for mapping in mappings:
        queues = {each: at for at, group in enumerate(mapping) for each in group}
        modes = [(lazy, False) for lazy in (False, True)] + ([(True, True)] if len(mapping) == 1 else [])
        for lazy, blocking in modes:
            found += hangs(programs, queues.__getitem__, lazy, blocking)
    return found


def plan_of(schedule: str, pp: int) -> tuple[Plan, int]:
    """A plan, and a number of micro-batches that the schedule accepts."""
    suffix = {"1f1b": "", "interleaved": ".interleaved2"}.get(schedule, f".{schedule}")
    return parse_plan(f"pp{pp}.mb1{suffix}"), 2 * pp + (2 if schedule == "dualpipev" else 0)


ALL = list(partitions(STREAMS))
SCHEDULES = [rules.name for rules in offered_schedules()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.covering(8)
def test_no_schedule_hangs_under_any_sharing_of_hardware_queues(
    schedule: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, count = plan_of(schedule, pp)
    assert len(ALL) == 2 and count_hangs(record(plan, count, monkeypatch), ALL) == 0


def test_the_tensors_of_a_message_are_one_batch_to_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of GPipe exchange each micro-batch forward and back in each of two steps."""
    for program in record(parse_plan("pp2.mb1.gpipe"), 3, monkeypatch, headers=False):
        batches = [item.transfers for item in program if item.transfers]
        assert len(batches) == 2 * 2 * 3 and all(batch == batch[:1] * PARTS for batch in batches)


def one_ahead(orders: Any) -> list[list[Action | Receive]]:
    """Programs without a common order, which the runner had before: a rank posts receives in the order of sending, up
    to the message that its next action needs."""
    programs: list[list[Action | Receive]] = []
    for program in rank_programs(orders):
        receives: list[Receive] = [each for each in program if isinstance(each, Receive)]
        actions = [each for each in program if isinstance(each, Action)]
        programs.append([])
        for first, second in pairwise([None, *actions, None]):
            needed = next((each for each in receives if consumer(each.action) == second), None)
            while needed is not None and needed in receives:
                programs[-1].append(next(each for each in receives if each.sender == needed.sender))
                receives.remove(programs[-1][-1])  # type: ignore[arg-type]
            programs[-1] += [first] if first is not None else []
    return programs


def consumer(action: Action) -> Action:
    return action._replace(stage=action.stage + (1 if action.kind is ActionKind.F else -1))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
def test_receives_that_are_always_one_action_ahead_hang(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees the deadlocks of programs that are no parts of a common order."""
    plan, count = plan_of(schedule, 2)
    monkeypatch.setattr(runner, "rank_programs", one_ahead)
    programs = record(plan, count, monkeypatch, headers=False)
    assert count_hangs(programs, ALL) == 5
