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

    wait_timer: WaitTimer = field(default_factory=WaitTimer)
    sent: float = 0.0

    def read(self) -> CommStats:
        """Since it was last read."""
        found, self.sent = CommStats(self.sent, self.wait_timer.read()), 0.0
        return found

    def discard(self) -> None:
        """What came since it was last read."""
        self.sent = 0.0
        self.wait_timer.discard()


@dataclass(frozen=True, eq=False)
class CommGroup:
    """`ranks` are global numbers, this rank's place among them is `index`. `process`: unless they share memory;
    `lanes`: those of
    this host, where they share it or every host has several."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    shm: ShmCollectives | None = None
    timer: CommTimer = field(default_factory=CommTimer)
    second_messages: deque[Any] = field(default_factory=deque)
    """Second messages that wait for their turn (lowrank.py)."""
    intra_host: bool = False
    """Whether its process group is known to stay on one host."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """All process groups that it goes through."""
        between = self.shm.inter_host_groups if self.shm is not None else ()
        return [each.process_group for each in (self, *between) if each.process_group is not None]

    @property
    def timers(self) -> list[CommTimer]:
        """Its own, and those of its ways between hosts."""
        return [each.timer for each in (self, *(self.shm.inter_host_groups if self.shm is not None else ()))]

    def read_stats(self) -> CommStats:
        """Since it was last asked; what was sent between hosts too, waits for that are in its own."""
        own, *between = [meter.read() for meter in self.timers]
        return CommStats(own.sent + sum(each.sent for each in between), own.waited)

    def is_native(self, tensor: torch.Tensor) -> bool:
        """Whether NCCL carries `tensor`: its own flat collectives are good."""
        return self.process_group is not None and uses_nccl(self.backends, tensor.device.type)

    @cached_property
    def backends(self) -> str:
        """What carries tensors of which devices, as torch says it: one name for a group of both would be that of
        neither."""
        return dist.get_backend_config(self.process_group)


@dataclass(frozen=True, eq=False)
class ShardPlacement:
    """Who holds the states of a unit: of `copies` equal copies this rank holds part number `copy`, cut into `shards`,
    of it shard `shard`."""

    shards: int
    shard: int
    replicas: int
    replica: int
    shard_group: CommGroup | None
    """The ranks that share a copy."""
    replicate_group: CommGroup | None
    """The ranks that hold the same shard."""
    tensor_group: CommGroup | None
    """The tensor ranks among which its tensors are split or alike."""
    weights: tuple[int, ...] = ()
    """Parts that the shards are of a copy; empty: equal ones."""
    diloco: ShardPlacement | None = None
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
    return replace(sharing, replicas=1, replica=0, replicate_group=None, diloco=sharing)


def wrap_process_group(process: dist.ProcessGroup | None) -> CommGroup | None:
    """The group of a process group of torch; None for one rank."""
    if process is None or dist.get_world_size(process) == 1:
        return None
    return CommGroup(tuple(dist.get_process_group_ranks(process)), dist.get_rank(process), process)


def wrap_shm_collectives(lanes: ShmCollectives) -> CommGroup:
    """The group of ranks that share memory."""
    return CommGroup(lanes.ranks, lanes.index, shm=lanes)


def shutdown_groups(groups: Sequence[CommGroup | None]) -> None:
    """Before this rank ends: the others of `groups` have read all that they need of its memory."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.close()


def quiesce_groups(groups: Sequence[CommGroup | None]) -> None:
    """Wait until no rank of `groups` reads this rank's shared memory, so that it may be written."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.quiesce()


def shrink_staging_buffers(groups: Iterable[CommGroup | None]) -> None:
    """Free staging memory that collectives larger than those of training have left. Every rank of the groups calls
    it."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.buffers.shrink()
