"""Defines the actions of pipeline ranks, and checks and simulates orders of actions. The schedules, the planner and the
runtime use it.

`Action` is one action of a rank: forward (F) or backward (B, W) of one micro-batch on one stage.

If a stage has no W, B is its whole backward. Otherwise B computes the gradient of the stage's input, and W computes the
gradients of the stage's weights. An action is written as stage, kind, micro-batch, as in torch's schedule tables:
`2F5`.

`check_orders` checks the orders of all ranks. `rank_programs` adds the receives of messages to them.

An order is valid under these conditions. Each pair of stage and micro-batch has exactly one F and one B, and all
actions of a stage are on one rank. A stage has W for all of its micro-batches or for none. The actions of all ranks
have a common order in which the inputs of every action are present. Sends never block. A rank waits before an action
until the inputs of the action are present.

[Note: message order] On an accelerator, a send and a receive occupy their streams until both have started, and streams
may share one hardware queue, in which work starts in the order of launch. So ranks could wait for each other, although
the actions have an order without a deadlock. `rank_programs` prevents this: all actions and messages have one common
order, each rank launches its part of it, and a message has one place in it, for the send and for the receive. The first
unfinished item of the common order can then always start, because everything that is ahead of it in any queue is
finished. This holds for any assignment of streams to queues, for blocking transfers, and if the host waits for the
device anywhere. A consequence is that a rank receives the messages of another rank in the order in which they are sent.

`simulate_orders` simulates an order with given times. It computes the start and the end of each action, and the idle
time and the activations in flight of each rank.

An action starts when its rank is free and its inputs are present. A result from another rank arrives `transfer` seconds
after the end of the action there. Sending takes no time on the sender. A micro-batch is in flight on a stage from the
start of its F to the end of its B. If the stage has W, the micro-batch is in flight until the end of its W.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message


class ActionKind(StrEnum):
    """The kinds of actions: forward, backward (or only the gradient of the input), and gradients of the weights."""

    F = "F"
    B = "B"
    W = "W"


class Action(NamedTuple):
    """One action of a pipeline rank.

    >>> str(Action(ActionKind.F, 2, 5))
    '2F5'
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse_action(text: str) -> Action:
    """Returns the action of the text form `text`.

    Raises: InputError if `text` is not an action.

    >>> parse_action("2F5").micro_batch
    5
    """
    match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
    if match is None:
        raise InputError(
            Message(
                "pipeline action {text!r} must be a stage, then F, B or W, then a micro-batch; example: '2F5'",
                text=text,
            )
        )
    return Action(ActionKind(match[2]), int(match[1]), int(match[3]))


def action_dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Returns the actions whose results `action` reads, in a pipeline of `stages` stages."""
    kind, stage, micro_batch = action
    if kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, micro_batch),) if stage else ()
    if kind is ActionKind.W:
        return (Action(ActionKind.B, stage, micro_batch),)
    own = Action(ActionKind.F, stage, micro_batch)
    return (own, Action(ActionKind.B, stage + 1, micro_batch)) if stage < stages - 1 else (own,)


RankOrders = Sequence[Sequence[Action]]


def stage_ranks(orders: RankOrders) -> dict[int, int]:
    """Returns the pipeline rank of each stage, in the order of stages.

    Raises: InputError if a stage is on two ranks.
    """
    found: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if found.setdefault(action.stage, rank) != rank:
                raise InputError(
                    Message(
                        "stage {stage} is on pipeline ranks {found} and {rank} ({action}); a stage has one rank",
                        stage=action.stage,
                        found=found[action.stage],
                        rank=rank,
                        action=action,
                    )
                )
    return dict(sorted(found.items()))


def topological_walk(orders: RankOrders) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) in an order in which the inputs of every action are present.

    Raises: InputError at a deadlock.
    """
    stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    position = [0] * len(orders)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(reversed(range(len(orders))))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            missing = next((need for need in action_dependencies(action, stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            position[rank] += 1
            done.add(action)
            ready.extend(waiting.pop(action, ()))
    stuck = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
    if stuck:
        raise InputError(
            _deadlock_error(orders, position, min(stuck, key=lambda rank: (position[rank], rank)), waiting)
        )


def _deadlock_error(orders: RankOrders, position: Sequence[int], rank: int, waiting: dict[Action, list[int]]) -> str:
    action = orders[rank][position[rank]]
    missing = next(need for need, ranks in waiting.items() if rank in ranks)
    holder = next((other for other, order in enumerate(orders) if missing in order), None)
    if holder is None:
        why = Message("which no rank runs")
    elif holder == rank:
        why = Message("which comes later on the same rank")
    else:
        why = Message(
            "which pipeline rank {holder} cannot reach: it waits at {orders}",
            holder=holder,
            orders=orders[holder][position[holder]],
        )
    return Message(
        "pipeline deadlock: {action} on pipeline rank {rank} can never run; it needs {missing}, {why}",
        action=action,
        rank=rank,
        missing=missing,
        why=why,
    )


def check_orders(orders: RankOrders, stages: int, micro_batches: int) -> None:
    """Checks the orders of all pipeline ranks.

    Raises: InputError with the first action that is missing, repeated, out of range, or can never run.
    """
    owner = stage_ranks(orders)
    counts = Counter(action for order in orders for action in order)
    for action, count in counts.items():
        if action.stage >= stages or action.micro_batch >= micro_batches:
            raise InputError(
                Message(
                    "pipeline action {action} is outside {stages} stages and {micro_batches} "
                    "micro-batches{action_location}",
                    action=action,
                    stages=stages,
                    micro_batches=micro_batches,
                    action_location=_action_location(orders, action),
                )
            )
        if count > 1:
            raise InputError(
                Message(
                    "pipeline action {action} occurs {count} times{action_location}; each action must occur once",
                    action=action,
                    count=count,
                    action_location=_action_location(orders, action),
                )
            )
    split = {action.stage for action in counts if action.kind is ActionKind.W}
    for stage in range(stages):
        for kind in ActionKind if stage in split else (ActionKind.F, ActionKind.B):
            for micro_batch in range(micro_batches):
                if Action(kind, stage, micro_batch) not in counts:
                    where = Message(" on pipeline rank {owner}", owner=owner[stage]) if stage in owner else ""
                    raise InputError(
                        Message(
                            "pipeline action {action} is missing{where}; every stage runs every micro-batch",
                            action=Action(kind, stage, micro_batch),
                            where=where,
                        )
                    )
    for _ in topological_walk(orders):
        pass


def _action_location(orders: RankOrders, action: Action) -> str:
    rank, order = next((rank, order) for rank, order in enumerate(orders) if action in order)
    return Message(
        " (pipeline rank {rank}, place {index} of {count})", rank=rank, index=order.index(action) + 1, count=len(order)
    )


class Receive(NamedTuple):
    """The receive of the result of `action` from pipeline rank `sender`."""

    sender: int
    action: Action


def rank_programs(orders: RankOrders) -> list[list[Action | Receive]]:
    """Returns the program of each rank: its actions in the given order, with a `Receive` for each message from another
    rank. A rank sends the result of an action directly after the action.

    F of stage s sends its output to the rank of stage s + 1. B of stage s sends the gradient of its input to the rank
    of stage s - 1. A receive is launched one action before the message is needed, so that the transfer overlaps with
    this action. Exceptions are messages whose sender waits for a result of this action.

    Guarantees: the programs are parts of one common order of all actions and messages ([Note: message order]).

    Raises: InputError at a deadlock.
    """
    owner = stage_ranks(orders)
    programs: list[list[Action | Receive]] = [[] for _ in orders]
    for action in _common_order(orders):
        rank = owner[action.stage]
        programs[rank].append(action)
        neighbour = {ActionKind.F: action.stage + 1, ActionKind.B: action.stage - 1}.get(action.kind, action.stage)
        if (receiver := owner.get(neighbour, rank)) != rank:
            programs[receiver].append(Receive(rank, action))
    return programs


def _common_order(orders: RankOrders) -> Iterator[Action]:
    """Yields the actions of all ranks in an order in which the inputs of every action are present. Of the possible next
    actions, those come first whose rank then has the inputs of its following action too, and of these the one that
    starts first if F, B and W of a stage take equally long."""
    stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    split = {action.stage for order in orders for action in order if action.kind is ActionKind.W}
    backward = [1.0 if stage in split else 2.0 for stage in range(stages)]
    spans = simulate_orders(orders, [1.0] * stages, backward, weight=[1.0] * stages).spans
    start = {span.action: span.start for line in spans for span in line}
    owner = stage_ranks(orders)
    position = [0] * len(orders)
    placed: set[Action] = set()
    ready: dict[int, tuple[bool, float, int]] = {}
    changed = set(range(len(orders)))
    while len(placed) < len(start):
        for rank in changed:
            ready.pop(rank, None)
            current, following = (orders[rank][at : at + 1] for at in (position[rank], position[rank] + 1))
            if current and placed.issuperset(action_dependencies(current[0], stages)):
                needs = {need for action in following for need in action_dependencies(action, stages)}
                ready[rank] = (not placed.issuperset(needs - {*current}), start[current[0]], rank)
        rank = min(ready.values())[2]
        action = orders[rank][position[rank]]
        yield action
        placed.add(action)
        position[rank] += 1
        changed = {rank, *(owner.get(action.stage + step, rank) for step in (-1, 1))}


class ActionSpan(NamedTuple):
    """An action, with its start and end in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """The result of a simulation. `spans` lists the actions of each pipeline rank. `idle`: for each rank, the fraction
    of the makespan in which it is idle. `in_flight` is the result of `max_in_flight`."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    in_flight: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Returns the mean idle fraction of all ranks."""
        return sum(self.idle) / len(self.idle)


def simulate_orders(
    orders: RankOrders,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float = 0.0,
    weight: Sequence[float] | None = None,
) -> ScheduleTimeline:
    """Simulates `orders`. `forward`, `backward` and `weight` have the seconds of F, B and W for each stage; stages
    without W ignore `weight`. `transfer` is the seconds of a message between ranks.

    Raises: InputError if the order deadlocks.

    >>> from meshwright.spec.schedules.schedule import schedule_orders
    >>> simulate_orders(schedule_orders("1f1b", 2, 1, 3), [1.0, 1.0], [2.0, 2.0]).makespan
    12.0
    """
    seconds = {
        ActionKind.F: forward,
        ActionKind.B: backward,
        ActionKind.W: weight if weight is not None else [0.0] * len(backward),
    }
    owner = stage_ranks(orders)
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    for rank, action in topological_walk(orders):
        arrivals = (
            ends[need] + (transfer if owner[need.stage] != rank else 0.0)
            for need in action_dependencies(action, len(owner))
        )
        start = max(free[rank], *arrivals, 0.0)
        free[rank] = ends[action] = start + seconds[action.kind][action.stage]
        spans[rank].append(ActionSpan(action, start, free[rank]))
    makespan = max(free, default=0.0)
    busy = [sum(span.end - span.start for span in line) for line in spans]
    return ScheduleTimeline(
        spans=tuple(tuple(line) for line in spans),
        makespan=makespan,
        idle=tuple(1.0 - worked / makespan if makespan else 0.0 for worked in busy),
        in_flight=tuple(max_in_flight(order) for order in orders),
    )


def max_in_flight(order: Sequence[Action], sizes: Sequence[float] | None = None) -> float:
    """Returns the peak of the activations that a rank stores for backward.

    `sizes` is the size of the activations of one micro-batch on each stage, for example in bytes. Without `sizes` the
    result is a number of micro-batches: a micro-batch on one stage counts as 1 / (number of stages of the rank). W
    frees the activations if the stage has W, otherwise B frees them.

    >>> from meshwright.spec.schedules.schedule import schedule_orders
    >>> [max_in_flight(order) for order in schedule_orders("1f1b", 4, 1, 16)]
    [4.0, 3.0, 2.0, 1.0]
    >>> [max_in_flight(order) for order in schedule_orders("interleaved", 4, 2, 16)]
    [5.5, 4.5, 3.5, 2.5]
    """
    stages = {action.stage for action in order}
    split = {action.stage for action in order if action.kind is ActionKind.W}
    counts = dict.fromkeys(stages, 0)
    peak = 0.0
    for kind, stage, _ in order:
        if kind is ActionKind.F:
            counts[stage] += 1
            now = (
                sum(counts.values()) / len(stages)
                if sizes is None
                else sum(count * sizes[at] for at, count in counts.items())
            )
            peak = max(peak, now)
        elif kind is (ActionKind.W if stage in split else ActionKind.B):
            counts[stage] -= 1
    return peak
