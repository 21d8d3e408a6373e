"""A group: the ranks along one axis of the mesh, and how they exchange tensors. An axis of one rank has none: `group is
None`.

Ranks of one host without accelerators go through shared memory (lanes.py), equally many ranks of several hosts through
memory inside of each
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

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.shm.collectives import ShmCollectives
from meshwright.runtime.comm.timers import WaitTimer


class CommStats(NamedTuple):
    """Bytes that this rank has sent over the network, and seconds that it has waited for the others."""

    sent: float
    waited: float


@dataclass
class CommTimer:
    """Of one way to others. `clock` runs while this rank waits."""

    clock: WaitTimer = field(default_factory=WaitTimer)
    sent: float = 0.0

    def read(self) -> CommStats:
        """Since it was last read."""
        found, self.sent = CommStats(self.sent, self.clock.read()), 0.0
        return found

    def forget(self) -> None:
        """What came since it was last read."""
        self.sent = 0.0
        self.clock.forget()


@dataclass(frozen=True, eq=False)
class CommGroup:
    """`ranks` are global numbers, this rank's place among them is `index`. `process`: unless they share memory;
    `lanes`: those of
    this host, where they share it or every host has several."""

    ranks: tuple[int, ...]
    index: int
    process: dist.ProcessGroup | None = None
    lanes: ShmCollectives | None = None
    meter: CommTimer = field(default_factory=CommTimer)
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
    def meters(self) -> list[CommTimer]:
        """Its own, and those of its ways between hosts."""
        return [each.meter for each in (self, *(self.lanes.between if self.lanes is not None else ()))]

    def measured(self) -> CommStats:
        """Since it was last asked; what was sent between hosts too, waits for that are in its own."""
        own, *between = [meter.read() for meter in self.meters]
        return CommStats(own.sent + sum(each.sent for each in between), own.waited)

    def is_native(self, tensor: torch.Tensor) -> bool:
        """Whether NCCL carries `tensor`: its own flat collectives are good."""
        return self.process is not None and uses_nccl(self.backends, tensor.device.type)

    @cached_property
    def backends(self) -> str:
        """What carries tensors of which devices, as torch says it: one name for a group of both would be that of
        neither."""
        return dist.get_backend_config(self.process)


@dataclass(frozen=True, eq=False)
class ShardPlacement:
    """Who holds the states of a unit: of `copies` equal copies this rank holds part number `copy`, cut into `shards`,
    of it shard `shard`."""

    shards: int
    shard: int
    copies: int
    copy: int
    shard_group: CommGroup | None
    """The ranks that share a copy."""
    copy_group: CommGroup | None
    """The ranks that hold the same shard."""
    tensor_group: CommGroup | None
    """The tensor ranks among which its tensors are split or alike."""
    weights: tuple[int, ...] = ()
    """Parts that the shards are of a copy; empty: equal ones."""
    sites: ShardPlacement | None = None
    """Of a replica that goes its own way (`alone`): how it shares with the others when they meet."""


def uses_nccl(backends: str, device: str) -> bool:
    """
    >>> uses_nccl("cpu:gloo,cuda:nccl", "cuda"), uses_nccl("cuda:nccl", "cuda")
    (True, True)
    >>> uses_nccl("cpu:gloo,cuda:nccl", "cpu"), uses_nccl("cpu:gloo,cuda:gloo", "cuda")
    (False, False)
    """
    return backend_of(device).collective_library == "nccl" and f"{device}:nccl" in backends.split(",")


def without_replicas(sharing: ShardPlacement) -> ShardPlacement:
    """The same for ranks whose other copies go their own ways."""
    return replace(sharing, copies=1, copy=0, copy_group=None, sites=sharing)


def wrap_process_group(process: dist.ProcessGroup | None) -> CommGroup | None:
    """The group of a process group of torch; None for one rank."""
    if process is None or dist.get_world_size(process) == 1:
        return None
    return CommGroup(tuple(dist.get_process_group_ranks(process)), dist.get_rank(process), process)


def wrap_shm_collectives(lanes: ShmCollectives) -> CommGroup:
    """The group of ranks that share memory."""
    return CommGroup(lanes.ranks, lanes.index, lanes=lanes)


def shutdown_groups(groups: Sequence[CommGroup | None]) -> None:
    """Before this rank ends: the others of `groups` have read all that they need of its memory."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.close()


def quiesce_groups(groups: Sequence[CommGroup | None]) -> None:
    """Wait until no rank of `groups` reads this rank's shared memory, so that it may be written."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.settle()


def shrink_staging_buffers(groups: Iterable[CommGroup | None]) -> None:
    """Free staging memory that collectives larger than those of training have left. Every rank of the groups calls
    it."""
    for group in groups:
        if group is not None and group.lanes is not None:
            group.lanes.slots.shrink()
