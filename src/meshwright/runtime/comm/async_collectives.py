"""Starts collectives on flat buffers, and returns `CollectiveWork` objects that finish them. Gradient reductions and
all-gathers of weights use this module.

The implementation depends on the ranks of the group:

- CPU ranks of one host read each other's memory (shm/collectives.py).
- CPU ranks of several hosts use a hierarchy, in which data cross the network once per host (topology.py). This requires
  equal numbers of ranks per host, at least 2. Other CPU ranks use gloo.
- NCCL groups use NCCL's flat collectives.
- gloo groups use an all-to-all for reduce-scatter and all-gather, because gloo's own reduce-scatter and all-gather are
  slow. After the all-to-all of a reduce-scatter, each rank sums its slices in order of rank. For 16 MiB and 2 ranks,
  gloo's all-reduce took 14 ms, its reduce-scatter 40 ms, its all-gather 77 ms, and one all-to-all 8 ms
  (bench/exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.collectives import InterHostReducer
from meshwright.runtime.error_propagation import interruptible_wait


class CollectiveWork:
    """A collective in flight, like torch.distributed.Work. The first `wait` finishes the collective. Later calls do
    nothing.

    `work`: torch's handle, or None. `then`: the last step, which runs after `work` is complete. `group`: the group
    whose timer measures the wait.
    """

    def __init__(
        self, work: dist.Work | None, then: Callable[[], None] | None = None, group: CommGroup | None = None
    ) -> None:
        self._work, self._finish, self._group = work, then, group

    @property
    def is_done(self) -> bool:
        """Returns whether torch's handle is complete, so that `wait` does not block. Returns True for a collective in
        shared memory, which has no handle, although its `wait` may still block."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Waits until the collective is complete. Then runs its last step."""
        work, then = self._work, self._finish
        self._work = self._finish = None
        if work is None and then is None:
            return
        with self._group.timer.wait_timer if self._group is not None else nullcontext():
            if work is not None:
                with interruptible_wait(self._group.process_group if self._group is not None else None):
                    work.wait()
            if then is not None:
                then()

    def then(self, then: Callable[[], None]) -> CollectiveWork:
        """Returns a new object whose last step is `then`. The function `then` must call `wait` of the present object,
        whose own last step would not run otherwise."""
        return CollectiveWork(self._work, then, self._group)


COMPLETED_WORK = CollectiveWork(None)


def all_reduce(
    flat: torch.Tensor, group: CommGroup | None, use_max: bool = False, inter_host: InterHostReducer | None = None
) -> CollectiveWork:
    """Sums the contiguous tensor `flat` in place over `group`, or takes the maximum of each element if `use_max`.
    `inter_host` compresses the traffic between hosts. Returns the work."""
    if group is None:
        return COMPLETED_WORK
    if group.shm is not None:
        return CollectiveWork(None, group.shm.all_reduce(flat.view(-1), use_max, inter_host), group)
    if inter_host is not None:
        return CollectiveWork(None, inter_host.all_reduce(flat.view(-1), group, group).wait, group)
    # The timer counts the bytes that a ring all-reduce sends.
    group.timer.sent += 2 * (group.size - 1) / group.size * flat.numel() * flat.element_size()
    operation = dist.ReduceOp.MAX if use_max else dist.ReduceOp.SUM
    return CollectiveWork(dist.all_reduce(flat, operation, group=group.process_group, async_op=True), None, group)


def reduce_scatter(
    full: torch.Tensor,
    out: torch.Tensor,
    group: CommGroup | None,
    inter_host: InterHostReducer | None = None,
    sizes: Sequence[int] | None = None,
) -> CollectiveWork:
    """Reduces `full` (n elements) over `group` and writes this rank's slice of the sum to `out` (n / ranks elements,
    possibly inside `full`). `sizes`: the number of elements of each rank's slice, if unequal. `inter_host` compresses
    the traffic between hosts. Returns the work."""
    if group is None:
        return CollectiveWork(None, None if out.data_ptr() == full.data_ptr() else lambda: _copy(out, full))
    if uses_shared_memory(group, sizes):
        assert group.shm is not None
        return CollectiveWork(None, group.shm.reduce_scatter(full, out, inter_host, sizes), group)
    if inter_host is not None:
        return CollectiveWork(None, inter_host.reduce_scatter(full, out, group, group).wait, group)
    group.timer.sent += (full.numel() - out.numel()) * full.element_size()
    if group.is_native(full) and sizes is not None:
        return CollectiveWork(
            dist.reduce_scatter(out, list(full.split(list(sizes))), group=group.process_group, async_op=True),
            None,
            group,
        )
    if group.is_native(full):
        work = _torch_collective("reduce_scatter_single", "reduce_scatter_tensor")(
            out, full, group=group.process_group, async_op=True
        )
        return CollectiveWork(work, None, group)
    received = full.new_empty(out.numel() * group.size)
    each, mine = (None, None) if sizes is None else (list(sizes), [out.numel()] * group.size)
    work = dist.all_to_all_single(received, full, mine, each, group=group.process_group, async_op=True)
    return CollectiveWork(work, lambda: _sum_into(out, received), group)


def uses_shared_memory(group: CommGroup, sizes: Sequence[int] | None) -> bool:
    """Returns whether a collective of `group` uses shared memory. `sizes`: the number of elements of each rank's slice,
    None if all slices have equal sizes.

    A hierarchical group (topology.py) supports only equal slices. Collectives with unequal slices use the group's
    process group of all ranks.
    """
    return group.shm is not None and (sizes is None or group.process_group is None)


def _copy(out: torch.Tensor, full: torch.Tensor) -> None:
    out.copy_(full)


def _sum_into(out: torch.Tensor, received: torch.Tensor) -> None:
    torch.sum(received.view(-1, out.numel()), dim=0, out=out)


def all_gather(
    full: torch.Tensor, shard: torch.Tensor, group: CommGroup | None, sizes: Sequence[int] | None = None
) -> CollectiveWork:
    """Gathers the shards of all ranks of `group` into `full`, in order of rank. `shard` may be this rank's slice of
    `full`. `sizes`: the number of elements of each rank's shard, if unequal. Returns the work."""
    if group is None:
        return CollectiveWork(None, None if shard.data_ptr() == full.data_ptr() else lambda: _copy(full, shard))
    if uses_shared_memory(group, sizes):
        assert group.shm is not None
        return CollectiveWork(None, group.shm.all_gather(full, shard, sizes), group)
    group.timer.sent += (group.size - 1) * shard.numel() * shard.element_size()
    if group.is_native(full) and sizes is not None:
        return CollectiveWork(
            dist.all_gather(list(full.split(list(sizes))), shard, group=group.process_group, async_op=True), None, group
        )
    if group.is_native(full):
        work = _torch_collective("all_gather_single", "all_gather_into_tensor")(
            full, shard, group=group.process_group, async_op=True
        )
        return CollectiveWork(work, None, group)
    repeated = shard.repeat(group.size)
    each, mine = (None, None) if sizes is None else (list(sizes), [shard.numel()] * group.size)
    work = dist.all_to_all_single(full, repeated, each, mine, group=group.process_group, async_op=True)
    return CollectiveWork(work, lambda: _retain(repeated), group)


def all_to_all(out: torch.Tensor, full: torch.Tensor, group: CommGroup | None) -> CollectiveWork:
    """Exchanges equal slices of flat tensors. On rank r, `out` receives slice r of every rank's `full`, in order of
    rank. Returns the work."""
    if group is None:
        return CollectiveWork(None, lambda: _copy(out, full))
    rows = [[1] * group.size] * group.size
    return all_to_all_rows(out.view(group.size, -1), full.view(group.size, -1), rows, group)


def all_to_all_rows(
    out: torch.Tensor, sent: torch.Tensor, rows: Sequence[Sequence[int]], group: CommGroup
) -> CollectiveWork:
    """Exchanges different numbers of rows: rank i sends `rows[i][j]` rows of its `sent` (rows, width) to rank j. The
    rows in `sent` are in order of the receiving rank, those in `out` in order of the sending rank. Returns the work."""
    if group.shm is not None and group.process_group is None:
        return CollectiveWork(None, group.shm.all_to_all_rows(out, sent, rows), group)
    incoming, outgoing = [row[group.index] for row in rows], list(rows[group.index])
    group.timer.sent += (sum(outgoing) - outgoing[group.index]) * sent.shape[1] * sent.element_size()
    work = dist.all_to_all_single(out, sent, incoming, outgoing, group=group.process_group, async_op=True)
    return CollectiveWork(work, lambda: _retain(sent), group)


def exchange_rows(sent: torch.Tensor, rows: Sequence[Sequence[int]], group: CommGroup) -> torch.Tensor:
    """Returns the rows that this rank receives in `all_to_all_rows`, in order of the sending rank."""
    received = sent.new_empty(sum(row[group.index] for row in rows), sent.shape[1])
    all_to_all_rows(received, sent.contiguous(), rows, group).wait()
    return received


def _retain(buffer: torch.Tensor) -> None:
    """Does nothing. A closure that calls this function references `buffer`, so the memory of `buffer` is freed only
    after the collective has read it."""


def _torch_collective(name: str, old_name: str) -> Callable[..., dist.Work]:
    """Returns torch's flat collective `name`, which is called `old_name` before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, old_name)
