"""Checks an order of actions, and derives the messages between ranks.

An order is valid under these conditions. Each pair of stage and micro-batch has exactly one F and one B, and all
actions of a stage are on one rank. A stage has W for all of its micro-batches or for none. There is a global order in
which the inputs of every action are present. Sends never block; a rank waits before an action until its inputs are
present.

Between two ranks, messages are received in the order in which they are sent (`stage_messages`), so that one channel
serves forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action, ActionKind, action_dependencies

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


def stage_messages(orders: RankOrders) -> dict[tuple[int, int], list[Action]]:
    """Returns, for each pair (sender, receiver) of ranks, the actions whose results are sent, in the sender's order.

    F of stage s sends its output to the rank of stage s + 1. B of stage s sends the gradient of its input to the rank
    of stage s - 1. A receiver that receives in this order can identify every message.
    """
    owner = stage_ranks(orders)
    channels: dict[tuple[int, int], list[Action]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            neighbour = {ActionKind.F: action.stage + 1, ActionKind.B: action.stage - 1}.get(action.kind)
            receiver = owner.get(neighbour, rank) if neighbour is not None else rank
            if receiver != rank:
                channels.setdefault((rank, receiver), []).append(action)
    return channels
