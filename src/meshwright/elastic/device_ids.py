"""Numbers the devices of all machines. The devices of the first machine come first. Those of the nodes follow in the
order in which the nodes first joined.

Guarantees: A node that is lost and returns with the same name and device count gets the same device ids as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from meshwright.core.messages import Message


class NodeDevices(Protocol):
    """A node: its first device id, its number of devices, and whether it is leaving."""

    first: int
    devices: int
    leaving: bool


NodeT = TypeVar("NodeT", bound=NodeDevices)


class DeviceIds:
    """Assigns ids to the devices of all machines. `devices` is the number of devices of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}

    def first_of(self, name: str, devices: int, taken: Iterable[int]) -> int:
        """Returns the first device id of a node that has joined. `taken`: the first device ids of the connected
        nodes."""
        there = set(taken)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """Returns a readable name of a device: its index on its machine, and the machine.

        >>> seats = DeviceIds(2)
        >>> first_ids = seats.first_of("b", 4, []), seats.first_of("c", 1, [2]), seats.first_of("b", 4, [6])
        >>> (*first_ids, seats.name_of(3), seats.name_of(1))
        (2, 6, 2, '1 of node b', '1 of the first node')
        """
        first = max((first for first in self._known if first <= slot), default=0)
        return (
            Message("{slot} of node {known}", slot=slot - first, known=self._known[first][0])
            if first
            else Message("{slot} of the first node", slot=slot)
        )

    def seated(self, world: int, slots: Sequence[int], nodes: Sequence[NodeT]) -> list[tuple[NodeT | None, int]]:
        """Returns the machine (None for the first) and the local device of each of `world` new ranks.

        `slots` contains the device ids of all ranks. If it is empty, ranks take all devices in order, except those of
        nodes that are leaving. Ranks for which there is no device go to the first machine.

        >>> DeviceIds(2).seated(4, (), [])
        [(None, 0), (None, 1), (None, 2), (None, 3)]
        """
        if slots:
            stored = {slot: node for node in nodes for slot in range(node.first, node.first + node.devices)}
            return [(node := stored.get(slot), slot - (node.first if node else 0)) for slot in slots]
        seats: list[tuple[NodeT | None, int]] = [(None, device) for device in range(self.devices)]
        seats += [(node, device) for node in nodes if not node.leaving for device in range(node.devices)]
        return seats[:world] + [(None, rank) for rank in range(len(seats), world)]

    def all_of(self, nodes: Sequence[NodeDevices]) -> tuple[int, ...]:
        """Returns the device ids of the first machine and of `nodes`, machine by machine."""
        there = [range(self.devices), *(range(node.first, node.first + node.devices) for node in nodes)]
        return tuple(slot for devices in there for slot in devices)


def node_of_device(nodes: Sequence[NodeT], slot: int) -> NodeT | None:
    """Returns the node that owns a device id, or None for a device of the first machine."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)
