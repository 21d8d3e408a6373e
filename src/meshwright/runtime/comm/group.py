"""`CommGroup`: the ranks along one axis of the plan, and the means by which they exchange tensors. The collectives of
async_collectives.py take a `CommGroup`.

An axis with one rank has no group: callers check `group is None`. Otherwise there are three kinds of groups:

- CPU ranks of one host use shared memory (shm/collectives.py).
- CPU ranks of several hosts form a hierarchical group (topology.py), if every host has the same number of ranks, at
  least 2. The group uses shared memory inside each host and process groups between hosts.
- All other ranks use a process group of torch.

`linear_map` applies a linear map between ranks as an autograd function: its backward applies the transposed map.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.shm.collectives import ShmCollectives
from meshwright.runtime.comm.timers import WaitTimer


class CommStats(NamedTuple):
    """Bytes that this rank has sent over the network, and seconds for which it has waited for other ranks."""

    sent: float
    waited: float


@dataclass
class CommTimer:
    """Communication statistics of one process group. `wait_timer` measures the time for which this rank waits."""

    wait_timer: WaitTimer = field(default_factory=WaitTimer)
    sent: float = 0.0

    def read(self) -> CommStats:
        """Returns the statistics since the last reading."""
        found, self.sent = CommStats(self.sent, self.wait_timer.read()), 0.0
        return found

    def discard(self) -> None:
        """Discards the statistics since the last reading."""
        self.sent = 0.0
        self.wait_timer.discard()


@dataclass(frozen=True, eq=False)
class CommGroup:
    """A group of ranks. `ranks` are global ranks, and `index` is the position of this rank in `ranks`. `process_group`
    is None if all ranks share memory. `shm` is set if all ranks share memory, or if the group is hierarchical
    (topology.py)."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    shm: ShmCollectives | None = None
    timer: CommTimer = field(default_factory=CommTimer)
    second_messages: deque[Any] = field(default_factory=deque)
    """Transfers whose second message has not started yet, in order (compression.py)."""
    intra_host: bool = False
    """Whether all ranks are known to be on one host."""
    key: int = field(default_factory=itertools.count().__next__, init=False)
    """The number of the group in this process, by which a compiled graph names it (graph_collectives.py)."""
    by_key: ClassVar[weakref.WeakValueDictionary[int, CommGroup]] = weakref.WeakValueDictionary()

    def __post_init__(self) -> None:
        CommGroup.by_key[self.key] = self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """All process groups of torch that this group uses."""
        between = self.shm.inter_host_groups if self.shm is not None else ()
        return [each.process_group for each in (self, *between) if each.process_group is not None]

    @property
    def timers(self) -> list[CommTimer]:
        """The timers of this group and of its process groups between hosts."""
        return [each.timer for each in (self, *(self.shm.inter_host_groups if self.shm is not None else ()))]

    def read_stats(self) -> CommStats:
        """Returns the statistics since the last call. The bytes of a hierarchical group include those that its process
        groups send between hosts. Their waits are not added, because the group's own wait already includes them."""
        own, *between = [meter.read() for meter in self.timers]
        return CommStats(own.sent + sum(each.sent for each in between), own.waited)

    def is_native(self, tensor: torch.Tensor) -> bool:
        """Returns whether NCCL transfers `tensor`. Only then do callers use the flat collectives of torch.distributed,
        because gloo's are slow."""
        return self.process_group is not None and uses_nccl(self.backends, tensor.device.type)

    @cached_property
    def backends(self) -> str:
        """The backend for each device type, in torch's form ('cpu:gloo,cuda:nccl'). A group can have one backend for
        host tensors and another for device tensors."""
        return dist.get_backend_config(self.process_group)


@dataclass(frozen=True, eq=False)
class ShardPlacement:
    """How a parameter group is sharded and replicated. This rank stores shard `shard` of `shards` shards, in replica
    `replica` of `replicas` replicas."""

    shards: int
    shard: int
    replicas: int
    replica: int
    shard_group: CommGroup | None
    """The ranks that store the shards of one replica."""
    replicate_group: CommGroup | None
    """The ranks that store replicas of this rank's shard."""
    tensor_group: CommGroup | None
    """The tensor ranks, which split or replicate each tensor."""
    weights: tuple[int, ...] = ()
    """Relative sizes of the shards. Empty if the sizes are equal."""
    diloco: ShardPlacement | None = None
    """With DiLoCo: the placement over all replicas, which is used when the replicas synchronise. Otherwise None."""


def uses_nccl(backends: str, device: str) -> bool:
    """Returns whether tensors on `device` use NCCL in a group with these `backends`.

    >>> uses_nccl("cpu:gloo,cuda:nccl", "cuda"), uses_nccl("cuda:nccl", "cuda")
    (True, True)
    >>> uses_nccl("cpu:gloo,cuda:nccl", "cpu"), uses_nccl("cpu:gloo,cuda:gloo", "cuda")
    (False, False)
    """
    return backend_of(device).collective_library == "nccl" and f"{device}:nccl" in backends.split(",")


def without_replicas(sharing: ShardPlacement) -> ShardPlacement:
    """Returns the placement of one DiLoCo replica, which does not reduce gradients over the other replicas in a
    step."""
    return replace(sharing, replicas=1, replica=0, replicate_group=None, diloco=sharing)


def wrap_process_group(process: dist.ProcessGroup | None) -> CommGroup | None:
    """Returns the `CommGroup` of a process group of torch, None for one rank."""
    if process is None or dist.get_world_size(process) == 1:
        return None
    return CommGroup(tuple(dist.get_process_group_ranks(process)), dist.get_rank(process), process)


def wrap_shm_collectives(lanes: ShmCollectives) -> CommGroup:
    """Returns the `CommGroup` of ranks that share memory."""
    return CommGroup(lanes.ranks, lanes.index, shm=lanes)


def shutdown_groups(groups: Sequence[CommGroup | None]) -> None:
    """Waits until the other ranks of `groups` have read all inputs in this rank's shared memory. Must be called before
    the process of this rank ends."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.close()


def quiesce_groups(groups: Sequence[CommGroup | None]) -> None:
    """Waits until no rank of `groups` reads this rank's shared memory. Afterwards this rank may write to the memory."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.quiesce()


def shrink_staging_buffers(groups: Iterable[CommGroup | None]) -> None:
    """Shrinks the staging buffers of all `groups` to one page, except buffers for gradients (`ordered_staging_buffer`).
    Called after collectives that were larger than those of training. Every rank of the groups calls it."""
    for group in groups:
        if group is not None and group.shm is not None:
            group.shm.buffers.shrink()


TensorMap = Callable[[torch.Tensor], torch.Tensor]


def linear_map(x: torch.Tensor, there: TensorMap, back: TensorMap) -> torch.Tensor:
    """Returns `there(x)`. Backward computes the gradient of `x` as `back(gradient)`. `back` must be the transpose of
    the linear map `there`."""
    result: torch.Tensor = _LinearMap.apply(x, there, back)
    return result


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: TensorMap, back: TensorMap) -> torch.Tensor:
        ctx.back = back
        result = there(x)
        if not result._is_view() or result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return result
        # Autograd forbids in-place operations on a view that a custom function returns. Nothing else uses this storage.
        return torch.ops.aten._unsafe_view(result, result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None
