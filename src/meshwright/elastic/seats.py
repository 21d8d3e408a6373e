"""The devices of several machines by one number each: those of the first, then those of every node in the order in which they first came.

Promise: a node that is lost and comes back, by its name and number of devices, has the numbers that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Holder(Protocol):
    """A node: its first slot, how many it has, and whether it has been asked to go."""

    first: int
    devices: int
    leaving: bool


Node = TypeVar("Node", bound=Holder)


class Seats:
    """`devices`: of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}

    def first_of(self, name: str, devices: int, held: Iterable[int]) -> int:
        """The first slot of a node that has come; `held`: those of nodes that are there."""
        there = set(held)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """In words: the device as its machine counts it, and the machine.

        >>> seats = Seats(2)
        >>> seats.first_of("b", 4, []), seats.first_of("c", 1, [2]), seats.first_of("b", 4, [6]), seats.name_of(3), seats.name_of(1)
        (2, 6, 2, '1 of node b', '1 of the first node')
        """
        first = max((first for first in self._known if first <= slot), default=0)
        return f"{slot - first} of node {self._known[first][0]}" if first else f"{slot} of the first node"

    def seated(self, world: int, slots: Sequence[int], nodes: Sequence[Node]) -> list[tuple[Node | None, int]]:
        """The machine of each of `world` new ranks, None for the first, and its device there. `slots`: those of all ranks; empty: all devices in
        order, but for those of nodes that are leaving, and where there are too few, the ranks that are left over go to the first machine.

        >>> Seats(2).seated(4, (), [])
        [(None, 0), (None, 1), (None, 2), (None, 3)]
        """
        if slots:
            held = {slot: node for node in nodes for slot in range(node.first, node.first + node.devices)}
            return [(node := held.get(slot), slot - (node.first if node else 0)) for slot in slots]
        seats: list[tuple[Node | None, int]] = [(None, device) for device in range(self.devices)]
        seats += [(node, device) for node in nodes if not node.leaving for device in range(node.devices)]
        return seats[:world] + [(None, rank) for rank in range(len(seats), world)]

    def all_of(self, nodes: Sequence[Holder]) -> tuple[int, ...]:
        """The slots of the first machine and of `nodes`, machine by machine."""
        there = [range(self.devices), *(range(node.first, node.first + node.devices) for node in nodes)]
        return tuple(slot for devices in there for slot in devices)


def holder(nodes: Sequence[Node], slot: int) -> Node | None:
    """Whose slot it is; None: the first machine's."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)
