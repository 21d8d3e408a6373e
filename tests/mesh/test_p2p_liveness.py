"""Point-to-point messages of pipelines under the rules of NCCL: a send and a receive occupy their streams until both
have started, and streams share hardware queues. The programs are recorded from the runner and `P2P`."""

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

from meshwright.runtime.comm.topology import Topology
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline import p2p, runner
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.action import Action, ActionKind, Receive, rank_programs
from meshwright.spec.schedules.schedule import offered_schedules

PARTS = 2
COMPUTE = "compute"
ROLES = (COMPUTE, "to next", "from next", "to previous", "from previous")
"""The streams of a rank: each direction to each neighbour has one, because it has a communicator of its own."""


@dataclass
class Item:
    """A launch. Its stream is COMPUTE or a channel (sender, receiver). `waits`: items that must end before it starts.
    `blocks`: whether the host waits until it ends."""

    stream: Any
    waits: list[Item] = field(default_factory=list)
    blocks: bool = False
    started: bool = False
    ended: bool = False


class Recorder:
    """Stands for torch.distributed in `P2P`, and records what a rank launches, as ProcessGroupNCCL would: a transfer
    waits for the compute stream, and `Work.wait` makes the compute stream wait for the transfer."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.last: dict[Any, Item] = {}

    def launch(self, stream: Any, *waits: Item) -> Item:
        item = Item(stream, [each for each in (self.last.get(stream), *waits) if each is not None])
        self.last[stream] = item
        self.items.append(item)
        return item

    def transfer(self, tensor: torch.Tensor, rank: int, group: tuple[int, int]) -> Any:
        compute = self.last.get(COMPUTE)
        item = self.launch(group, *([compute] if compute is not None else []))
        return SimpleNamespace(wait=partial(self.launch, COMPUTE, item), is_completed=lambda: False)

    isend = irecv = transfer

    def recv(self, tensor: torch.Tensor, rank: int, group: tuple[int, int]) -> None:
        self.transfer(tensor, rank, group)
        self.last[group].blocks = True  # the host reads the header
        tensor[:4] = torch.tensor([1, 2, 1, 4])


def record(plan: Plan, micro_batches: int, monkeypatch: pytest.MonkeyPatch, headers: bool = True) -> list[list[Item]]:
    """Returns what each pipeline rank launches in two steps. `headers`: whether the first step, in which headers are
    sent, is one of them."""
    found = []
    grid = RankGrid(plan)
    channels: Any = {
        (at, to): (at, to) for at in range(plan.pp) for to in {(at + 1) % plan.pp, (at - 1) % plan.pp} - {at}
    }
    for rank in range(plan.pp):
        recorder = Recorder()
        monkeypatch.setattr(p2p, "dist", recorder)
        weight = torch.ones(1, 4, requires_grad=True)

        def forward(stage: int, batch: Any, received: Any, recorder: Recorder = recorder) -> tuple[torch.Tensor, ...]:
            recorder.launch(COMPUTE)
            output = [each * weight for each in received or [batch["x"]] * PARTS]  # noqa: B023
            return (sum(each.sum() for each in output),) if stage == plan.stages - 1 else tuple(output)

        made = runner.ScheduleRunner(
            ParallelContext(plan, Topology(grid, rank), torch.device("cpu"), p2p_groups=channels),
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


def hangs(programs: Sequence[Sequence[Item]], queue_of: Callable[[int, Any], Any], lazy: bool, blocking: bool) -> bool:
    """Returns whether ranks end up waiting for each other. `queue_of`: the hardware queue of a rank's stream. Items of
    a queue start in the order of launch. `lazy`: the first transfer of a channel blocks both hosts until both are
    there. `blocking`: the host waits for every launch (CUDA_LAUNCH_BLOCKING)."""
    for item in (item for program in programs for item in program):
        item.started = item.ended = False
    queues: dict[Any, deque[Item]] = {}
    transfers: dict[tuple[Any, int], list[Item]] = {}
    launched, counts, arrived = [0] * len(programs), dict[Any, int](), dict[Any, set[int]]()
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while launched[rank] < len(program):
                item, previous = program[launched[rank]], program[launched[rank] - 1]
                if launched[rank] and (blocking or previous.blocks) and not previous.ended:
                    break
                if lazy and item.stream != COMPUTE:
                    arrived.setdefault(item.stream, set()).add(rank)
                    if len(arrived[item.stream]) < 2:
                        break
                queues.setdefault((rank, queue_of(rank, item.stream)), deque()).append(item)
                if item.stream != COMPUTE:
                    at = counts[rank, item.stream] = counts.get((rank, item.stream), 0) + 1
                    transfers.setdefault((item.stream, at), []).append(item)
                launched[rank] += 1
                progress = True
        for queue in queues.values():
            while queue and all(each.ended for each in queue[0].waits):
                item = queue.popleft()
                item.started, item.ended, progress = True, item.stream == COMPUTE, True
        for key, pair in list(transfers.items()):
            if len(pair) == 2 and all(each.started for each in pair):
                for each in pair:
                    each.ended = True
                del transfers[key]
                progress = True
    return any(not item.ended for program in programs for item in program)


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """All ways to divide streams into queues: 52 for five streams."""
    if not items:
        yield []
        return
    for each in partitions(items[1:]):
        yield [[items[0]], *each]
        for at in range(len(each)):
            yield [*each[:at], [items[0], *each[at]], *each[at + 1 :]]


def role(pp: int, rank: int, stream: Any) -> str:
    if stream == COMPUTE:
        return COMPUTE
    sender, receiver = stream
    if sender == rank:
        return "to next" if receiver == (rank + 1) % pp else "to previous"
    return "from previous" if sender == (rank - 1) % pp else "from next"


def queue_of(pp: int, queues: dict[str, int], rank: int, stream: Any) -> int:
    return queues[role(pp, rank, stream)]


def count_hangs(plan: Plan, programs: Sequence[Sequence[Item]], mappings: Sequence[list[list[str]]]) -> int:
    """Returns in how many of the `mappings` of streams to queues, each with eager and with lazy communicators, and in
    both with launches that block, the ranks hang."""
    found = 0
    for mapping in mappings:
        queues = {each: at for at, group in enumerate(mapping) for each in group}
        modes = [(lazy, False) for lazy in (False, True)] + ([(True, True)] if len(mapping) == 1 else [])
        for lazy, blocking in modes:
            found += hangs(programs, partial(queue_of, plan.pp, queues), lazy, blocking)
    return found


def plan_of(schedule: str, pp: int) -> tuple[Plan, int]:
    """A plan, and a number of micro-batches that the schedule accepts."""
    suffix = {"1f1b": "", "interleaved": ".interleaved2"}.get(schedule, f".{schedule}")
    return parse_plan(f"pp{pp}.mb1{suffix}"), 2 * pp + (2 if schedule == "dualpipev" else 0)


ONE_QUEUE, ALL = [[list(ROLES)]], list(partitions(ROLES))
SCHEDULES = [rules.name for rules in offered_schedules()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_no_schedule_hangs_under_any_sharing_of_hardware_queues(
    schedule: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, count = plan_of(schedule, pp)
    assert len(ALL) == 52 and count_hangs(plan, record(plan, count, monkeypatch), ALL) == 0


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [5, 6, 7, 8])
def test_no_long_pipeline_hangs_under_any_sharing_of_hardware_queues(
    schedule: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, count = plan_of(schedule, pp)
    assert count_hangs(plan, record(plan, count, monkeypatch), ALL) == 0


@pytest.mark.parametrize(("schedule", "pp"), [("zbv", 8), ("dualpipev", 5), ("interleaved", 7), ("zbh1", 6)])
def test_no_long_pipeline_hangs_with_one_hardware_queue(
    schedule: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, count = plan_of(schedule, pp)
    assert count_hangs(plan, record(plan, count, monkeypatch), ONE_QUEUE) == 0


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
def test_receives_that_are_always_one_action_ahead_hang_with_one_hardware_queue(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check sees the deadlocks of programs that are no parts of a common order."""
    plan, count = plan_of(schedule, 2)
    monkeypatch.setattr(runner, "rank_programs", one_ahead)
    programs = record(plan, count, monkeypatch, headers=False)
    assert count_hangs(plan, programs, ONE_QUEUE) == 3
    assert not hangs(programs, lambda rank, stream: stream, lazy=False, blocking=False), "free streams hide it"
