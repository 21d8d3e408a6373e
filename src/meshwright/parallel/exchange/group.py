"""A group: the ranks along one axis of the mesh, and how they exchange tensors. An axis of one rank has none: `group is None`.

Ranks of one host without accelerators go through shared memory (lanes.py), equally many ranks of several hosts through memory inside of each
and a process group between (tiers.py), all others through a process group of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.parallel.exchange.clock import Clock
from meshwright.parallel.exchange.lanes import Lanes


class Measured(NamedTuple):
    """Bytes that this rank has sent over the network, and seconds that it has waited for the others."""

    sent: float
    waited: float


@dataclass
class Meter:
    """Of one way to others. `clock` runs while this rank waits."""

    clock: Clock = field(default_factory=Clock)
    sent: float = 0.0

    def read(self) -> Measured:
        """Since it was last read."""
        found, self.sent = Measured(self.sent, self.clock.read()), 0.0
        return found

    def forget(self) -> None:
        """What came since it was last read."""
        self.sent = 0.0
        self.clock.forget()


@dataclass(frozen=True, eq=False)
class Group:
    """`ranks` are global numbers, this rank's place among them is `index`. `process`: unless they share memory; `lanes`: those of
    this host, where they share it or every host has several."""

    ranks: tuple[int, ...]
    index: int
    process: dist.ProcessGroup | None = None
    lanes: Lanes | None = None
    meter: Meter = field(default_factory=Meter)
    line: deque[Any] = field(default_factory=deque)
    """Second messages that wait for their turn (lowrank.py)."""
    inside: bool = False
    """Whether its process group is known to stay on one host."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def processes(self) -> list[dist.ProcessGroup]:
        """All process groups that it goes through."""
        between = self.lanes.between if self.lanes is not None else ()
        return [each.process for each in (self, *between) if each.process is not None]

    @property
    def meters(self) -> list[Meter]:
        """Its own, and those of its ways between hosts."""
        return [each.meter for each in (self, *(self.lanes.between if self.lanes is not None else ()))]

    def measured(self) -> Measured:
        """Since it was last asked; what was sent between hosts too, waits for that are in its own."""
        own, *between = [meter.read() for meter in self.meters]
        return Measured(own.sent + sum(each.sent for each in between), own.waited)

    def is_native(self, tensor: torch.Tensor) -> bool:
        """Whether NCCL carries `tensor`: its own flat collectives are good."""
        return self.process is not None and by_nccl(self.backends, tensor.device.type)

    @cached_property
    def backends(self) -> str:
        """What carries tensors of which devices, as torch says it: one name for a group of both would be that of neither."""
        return dist.get_backend_config(self.process)


@dataclass(frozen=True, eq=False)
class Sharing:
    """Who holds the states of a unit: of `copies` equal copies this rank holds part number `copy`, cut into `shards`, of it shard `shard`."""

    shards: int
    shard: int
    copies: int
    copy: int
    shard_group: Group | None
    """The ranks that share a copy."""
    copy_group: Group | None
    """The ranks that hold the same shard."""
    tensor_group: Group | None
    """The tensor ranks among which its tensors are split or alike."""
    weights: tuple[int, ...] = ()
    """Parts that the shards are of a copy; empty: equal ones."""
    sites: Sharing | None = None
    """Of a replica that goes its own way (`alone`): how it shares with the others when they meet."""


def by_nccl(backends: str, device: str) -> bool:
    """
    >>> by_nccl("cpu:gloo,cuda:nccl", "cuda"), by_nccl("cuda:nccl", "cuda")
    (True, True)
    >>> by_nccl("cpu:gloo,cuda:nccl", "cpu"), by_nccl("cpu:gloo,cuda:gloo", "cuda")
    (False, False)
    """
    return device == "cuda" and "cuda:nccl" in backends.split(",")


def alone(sharing: Sharing) -> Sharing:
    """The same for ranks whose other copies go their own ways."""
    return replace(sharing, copies=1, copy=0, copy_group=None, sites=sharing)


def of_process(process: dist.ProcessGroup | None) -> Group | None:
    """The group of a process group of torch; None for one rank."""
    if process is None or dist.get_world_size(process) == 1:
        return None
    return Group(tuple(dist.get_process_group_ranks(process)), dist.get_rank(process), process)


def of_lanes(lanes: Lanes) -> Group:
    """The group of ranks that share memory."""
    return Group(lanes.ranks, lanes.index, lanes=lanes)


def part(groups: Sequence[Group | None]) -> None:
    """Before this rank ends: the others of `groups` have read all that they need of its memory."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.close()


def settle(groups: Sequence[Group | None]) -> None:
    """Wait until no rank of `groups` reads this rank's shared memory, so that it may be written."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.settle()


def shrink(groups: Iterable[Group | None]) -> None:
    """Free staging memory that collectives larger than those of training have left. Every rank of the groups calls it."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.slots.shrink()
