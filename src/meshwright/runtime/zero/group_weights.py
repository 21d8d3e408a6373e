"""Stores the weights of a flat parameter group, and gathers them for `FlatParamGroup` (param_group.py). At ZeRO 0 to 2
a rank stores all weights of the group. At ZeRO 3 it stores a shard, and the weights are gathered for use.

[Note: one copy per host] If all ranks of a shard group share memory and the plan does not offload weights, ZeRO 3
stores the full weights only once, in one anonymous file. Every rank of the group maps the file, and writes only its own
shard. Unsharding then copies nothing. It is only a barrier, at which each rank waits until every rank has written its
shard in the last update. No rank writes while another rank reads, because all ranks also wait at a barrier before an
update (`GradReducer.quiesce`).

[Note: resharded weights] Resharding frees the full weights. From then until the next unsharding, an access to the
parameters of the group raises InputError. If the ranks share the full weights, the weights stay in memory, and only the
parameters become views of a buffer without storage.

[Note: overlapped all-gather] At ZeRO 1 and 2, an update ends when the all-gathers of the updated weights have started
(`all_gather_async`). The next forward overlaps with them: it waits for the weights of a block before the block runs,
for embedding and front before it begins, and for other weights before the last block. Every other access to a parameter
waits too, whoever makes it (shard/access_guard.py). Only compiled code that receives the parameter object itself, such
as `dist.broadcast(p)`, bypasses this guard. So `Trainer.step` waits before it returns to a loop of the user. Ranks that
share memory wait in the update, since their processors move the data.

`FlatLayout` describes a flat parameter group: the position of each tensor in the flat buffer, and the range of the
buffer that is this rank's shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import nn

from meshwright.analysis.dry_run import without_write_recording
from meshwright.runtime.backend import DeviceStream, backend_of
from meshwright.runtime.comm.async_collectives import COMPLETED_WORK, CollectiveWork, all_gather, uses_shared_memory
from meshwright.runtime.comm.compression import FlatSlice
from meshwright.runtime.comm.group import CommGroup, ShardPlacement
from meshwright.runtime.comm.shm.memory import SharedMemory
from meshwright.runtime.deferred_init import materialize
from meshwright.runtime.offload.param_swapper import NvmeShard, SplitShard, split_shard
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.access_guard import AccessGuard, sharded_weight_message
from meshwright.runtime.shard.optimizer_shard import ParamRun
from meshwright.spec.enums import Offload
from meshwright.spec.layout import BucketLayout, bucket_gaps, offload_splits, shard_bounds


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Describes one flat parameter group of this rank. `make_flat_layout` creates it."""

    bucket: BucketLayout
    parameters: dict[str, nn.Parameter]
    context: ParallelContext
    placement: ShardPlacement
    shard_range: slice
    """The range of elements of the flat buffer that this rank updates."""
    frozen: bool
    """Whether no parameter of the group is trained. A frozen group has no gradients, no main weights and no
    reduction."""
    tied: bool
    """Whether other stages have replicas of the group. If so, the gradients of all replicas are summed."""

    @property
    def offsets(self) -> Mapping[str, int]:
        """Returns the offset of each tensor in the flat buffer, in elements."""
        return self.bucket.offsets

    @property
    def numel(self) -> int:
        """Returns the number of elements of the flat buffer."""
        return self.bucket.numel

    @property
    def zero_stage(self) -> int:
        """Returns the ZeRO stage of the plan."""
        return self.context.plan.zero

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are reduced after each backward pass of a step (ZeRO 2 and 3), which frees the full
        gradient buffer. At ZeRO 0 and 1, gradients are reduced only after the last pass."""
        return self.zero_stage >= 2

    @property
    def shard_group(self) -> CommGroup | None:
        """Returns the group of the ranks that store the shards of one replica, or None if one rank stores the
        replica."""
        return self.placement.shard_group

    @property
    def shard_numel(self) -> int:
        """Returns the number of elements of this rank's shard."""
        return self.shard_range.stop - self.shard_range.start

    @property
    def shard_sizes(self) -> list[int] | None:
        """Returns the number of elements of every shard, or None if all shards are equally long."""
        if not self.placement.weights:
            return None
        bounds = shard_bounds(self.numel, self.placement.shards, self.placement.weights)
        return [stop - start for start, stop in pairwise(bounds)]

    def gaps(self) -> list[slice]:
        """Returns the ranges of the flat buffer that belong to no tensor."""
        return bucket_gaps(self.bucket, {name: parameter.numel() for name, parameter in self.parameters.items()})

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor `name` as a view of the full flat buffer `flat`."""
        parameter, offset = self.parameters[name], self.offsets[name]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def shard_slice(self, name: str) -> slice:
        """Returns the range of this rank's shard that belongs to the tensor `name`. The range is empty if the shard has
        no element of the tensor."""
        first = self.offsets[name]
        last = first + self.parameters[name].numel()
        start, stop = self.shard_range.start, self.shard_range.stop
        return slice(max(first, start) - start, max(min(last, stop) - start, 0))

    def flat_slice(self, run: slice, like: torch.Tensor) -> FlatSlice:
        """Returns a description of the range `run` of the flat buffer, with the offsets and shapes of the tensors.
        `like` has the dtype and device of the buffer."""
        tensors = [(offset, tuple(self.parameters[name].shape)) for name, offset in self.offsets.items()]
        return FlatSlice(run.start, run.stop, like, tensors)

    def allocate(self, numel: int, shared: bool, dtype: torch.dtype, tied: bool = False) -> torch.Tensor:
        """Returns a buffer of `numel` zeros. The buffer is in shared memory if other ranks of this host read it
        (`shared`, `tied`)."""
        memory, placement = self.context.shared_memory, self.placement
        if memory is not None and (tied or (shared and (placement.shard_group or placement.replicate_group))):
            return memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.context.device)

    def shard_runs(self, groups: Mapping[str, int]) -> list[ParamRun]:
        """Returns the segments of the shard. `groups` maps each parameter name to the index of its optimizer group. A
        segment contains either matrices or vectors (biases and norms), all of one optimizer group, and the padding
        after them. Fused kernels round the elements after the last full SIMD vector of a segment differently. Segments
        end only at multiples of ALIGN_NUMEL, so there are no such elements, and each element rounds identically under
        every plan."""
        offsets, shard_range = self.offsets, self.shard_range
        tensors = sorted(
            ((name, tensor) for name, tensor in self.parameters.items() if tensor.numel()),
            key=lambda item: offsets[item[0]],
        )
        local = [
            (name, tensor)
            for name, tensor in tensors
            if offsets[name] < shard_range.stop and offsets[name] + tensor.numel() > shard_range.start
        ]
        firsts = [
            next(same_kind)[0]
            for _, same_kind in groupby(local, key=lambda item: (item[1].ndim > 1, groups.get(item[0], 0)))
        ]
        starts = [0, *(offsets[name] - shard_range.start for name in firsts[1:]), self.shard_numel]
        named = [(self.parameters[name].ndim > 1, name) for name in firsts] or [(True, "")]
        return [ParamRun(start, stop, *each) for (start, stop), each in zip(pairwise(starts), named, strict=True)]


def make_flat_layout(
    bucket: BucketLayout,
    parameters: dict[str, nn.Parameter],
    context: ParallelContext,
    placement: ShardPlacement,
    tied: bool = False,
) -> FlatLayout:
    """Returns the layout of a parameter group, including the range of this rank's shard."""
    bounds = shard_bounds(bucket.numel, placement.shards, placement.weights)
    shard_range = slice(*bounds[placement.shard : placement.shard + 2])
    frozen = not any(each.requires_grad for each in parameters.values())
    return FlatLayout(bucket, parameters, context, placement, shard_range, frozen, tied)


class SharedWeights:
    """Stores the full weights `full` in memory that all ranks of `group` share ([Note: one copy per host]). All ranks
    of the group must create this object together."""

    def __init__(self, host: SharedMemory, group: CommGroup, numel: int, dtype: torch.dtype) -> None:
        self._group = group
        segment = host.segment(numel * dtype.itemsize) if group.index == 0 else None
        files = torch.zeros(group.size, dtype=torch.int64)
        all_gather(files, torch.tensor([0 if segment is None else segment.fd]), group).wait()
        if segment is not None:
            host.staging_bytes -= segment.size
        self.full = host.map_file(group.ranks[0], int(files[0])).view(dtype)[:numel]
        self._views: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._is_visible = True

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers `parameters`, which are views of `full`, so that `set_visible` changes them."""
        none = torch.empty_like(self.full)
        parameters_data = [(parameter, parameter.data) for parameter in parameters]
        self._views = [
            (each, none.as_strided(data.shape, data.stride(), data.storage_offset()), data)
            for each, data in parameters_data
        ]
        none.untyped_storage().resize_(0)

    def set_visible(self, whole: bool) -> None:
        """Makes the parameters views of `full` if `whole` is True, otherwise views of a buffer without storage."""
        for parameter, hidden, visible in self._views if whole != self._is_visible else ():
            parameter.data = visible if whole else hidden
        self._is_visible = whole

    def barrier(self) -> CollectiveWork:
        """Starts a barrier. Returns a handle, which completes when every rank of the group has called `barrier`."""
        return all_gather(
            torch.zeros(self._group.size, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), self._group
        )


def make_shared_weights(
    host: SharedMemory | None, group: CommGroup | None, numel: int, dtype: torch.dtype
) -> SharedWeights | None:
    """Returns shared weights. Returns None if some ranks of `group` do not share memory, if there is no group, or if
    `numel` is 0."""
    if host is None or group is None or group.shm is None or group.process_group is not None or not numel:
        return None
    return SharedWeights(host, group, numel, dtype)


class GroupWeights:
    """The weights of one parameter group. The parameters are views of the flat buffer `full`, which has `dtype`."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        """Copies the parameters into the flat buffer, and makes them views of the buffer."""
        context = layout.context
        self.layout, self.dtype = layout, dtype
        self._all_gather_work: CollectiveWork | None = None
        self._pending_gather: CollectiveWork | None = None
        self._update_stream: DeviceStream | None = None
        self._gather_guard: AccessGuard | None = None
        """The guard of an overlapped all-gather. None if updates wait for their all-gathers."""
        message, group = sharded_weight_message(context.plan.name), layout.shard_group
        if layout.zero_stage in (1, 2) and group is not None and not uses_shared_memory(group, layout.shard_sizes):
            finish = weakref.WeakMethod(self.finish_gather)
            self._gather_guard = AccessGuard(
                layout.parameters, message, lambda: bound() if (bound := finish()) else None
            )
        self.access_guard = AccessGuard(layout.parameters, message)
        offloads = {Offload.parameters, Offload.parameters_disk} & set(context.plan.offload)
        self.shared = (
            make_shared_weights(context.shared_memory, layout.shard_group, layout.numel, dtype)
            if layout.zero_stage == 3 and not offloads
            else None
        )
        if self.shared is not None:
            self._full = self.shared.full
        else:
            self._full = layout.allocate(layout.numel, layout.zero_stage in (1, 2), dtype)
        for name, parameter in layout.parameters.items():
            view = layout.view(self.full, name)
            view.copy_(materialize(parameter))
            parameter.data = view
        shard = self.full[layout.shard_range]
        self.parts = (
            context.state_swapper.split(len(shard), layout.frozen)
            if context.state_swapper is not None
            else offload_splits(len(shard), 0, 0)
        )
        self.offloaded: SplitShard | None = None  # None if no weights of the shard are offloaded
        if self.shared is not None:
            self._shard = shard
            self.shared.attach(layout.parameters.values())
            self.shared.barrier().wait()  # until every rank has written its shard
            self.reshard()
        elif layout.zero_stage == 3:
            if context.state_swapper is not None:
                self.offloaded = split_shard(
                    context.state_swapper, Offload.parameters_disk in offloads, shard, self.parts
                )
            if self.offloaded is None:
                self._shard = layout.allocate(len(shard), True, dtype)
                self._shard.copy_(shard)
            self.reshard()
        else:
            self._shard = shard

    @property
    def full(self) -> torch.Tensor:
        """Returns the flat buffer of all weights, after an overlapped all-gather has ended. At ZeRO 3 the buffer may
        have no storage."""
        self.finish_gather()
        return self._full

    @property
    def address_range(self) -> tuple[int, int]:
        """Returns the first address of `full`, and the address after its end."""
        first = self._full.data_ptr()
        return first, first + self._full.nbytes

    @property
    def storages(self) -> list[torch.Tensor | NvmeShard]:
        """Returns for each part of the shard the tensor or the file range that stores its weights."""
        return (
            [self._shard[part.start : part.stop] for part in self.parts]
            if self.offloaded is None
            else self.offloaded.storages(self.parts)
        )

    @without_write_recording
    def prefetch(self) -> None:
        """Starts to all-gather the weights at ZeRO 3. If weights are offloaded, starts to fetch this rank's shard
        instead. `unshard` waits for the result."""
        if self.layout.zero_stage < 3 or not self.access_guard.is_denied or self._all_gather_work is not None:
            return
        if self.shared is not None:
            self._all_gather_work = self.shared.barrier()
        elif self.offloaded is not None:
            self.offloaded.prefetch()
        else:
            self._start_all_gather([self._shard])

    def cancel_prefetch(self) -> None:
        """Waits for an all-gather of `prefetch` whose result no `unshard` took, and frees the weights."""
        if self._all_gather_work is not None:
            self.reshard()

    @without_write_recording
    def unshard(self) -> None:
        """Makes the full weights available at ZeRO 3. Does nothing if they are already available."""
        if not self.access_guard.is_denied:
            return
        self.prefetch()
        if self.offloaded is not None:
            self._start_all_gather(self.offloaded.acquire())
        assert self._all_gather_work is not None
        self._all_gather_work.wait()
        self._all_gather_work = None
        self.access_guard.allow()
        if self.shared is not None:
            self.shared.set_visible(True)
        if self.offloaded is not None:
            self.offloaded.release()

    @without_write_recording
    def reshard(self) -> None:
        """Frees the full weights at ZeRO 3 and denies access to the parameters. The storage object is only resized, so
        views and saved tensors are valid again after `unshard`. Shared weights are not freed: their parameters become
        views of a buffer without storage."""
        if self.layout.zero_stage < 3:
            return
        if self._all_gather_work is not None:
            self._all_gather_work.wait()
            self._all_gather_work = None
        if self.offloaded is not None:
            self.offloaded.release()
        if self.shared is not None:
            self.shared.set_visible(False)
        else:
            self.full.untyped_storage().resize_(0)
        self.access_guard.deny()

    def write(self, main_params: Sequence[torch.Tensor]) -> None:
        """Copies the updated main weights into this rank's shard, in the dtype of the shard. `main_params` is one
        tensor for the whole shard, or one for each part."""
        self.finish_gather()
        sizes = [part.stop - part.start for part in self.parts]
        values = main_params[0].split(sizes) if len(main_params) == 1 else main_params
        for storage, part in zip(self.storages, values, strict=True):
            storage.copy_(part) if isinstance(storage, torch.Tensor) else storage.write(part)

    def all_gather(self) -> CollectiveWork:
        """Starts to all-gather the updated shards into the full weights at ZeRO 1 and 2. Returns the handle to wait
        for, which is already complete at ZeRO 0 and 3."""
        layout = self.layout
        return (
            all_gather(self.full, self._shard, layout.shard_group, sizes=layout.shard_sizes)
            if layout.zero_stage in (1, 2)
            else COMPLETED_WORK
        )

    def all_gather_async(self) -> CollectiveWork:
        """Starts `all_gather`. If the ranks do not share memory, the first access to a parameter waits for it ([Note:
        overlapped all-gather]). Returns the handle, which the caller must wait for if `is_gathering` is False."""
        work, device = self.all_gather(), self.layout.context.device
        if self._gather_guard is not None:
            self._pending_gather, self._update_stream = work, backend_of(device).current_stream(device)
            self._gather_guard.deny()
        return work

    @property
    def is_gathering(self) -> bool:
        """Whether an overlapped all-gather has started and nothing has waited for it yet."""
        return self._pending_gather is not None

    def finish_gather(self) -> None:
        """Waits for an overlapped all-gather, if there is one."""
        work, self._pending_gather = self._pending_gather, None
        if work is not None:
            self._finish_gather(work)

    @without_write_recording
    def _finish_gather(self, work: CollectiveWork) -> None:
        """Makes the stream of the update, in which the next forward runs, and the stream of the caller wait."""
        backend, device = backend_of(self.layout.context.device), self.layout.context.device
        assert self._gather_guard is not None
        self._gather_guard.allow()
        with backend.use_stream(self._update_stream):
            work.wait()
        here = backend.current_stream(device)
        if here is not None and self._update_stream is not None and here != self._update_stream:
            here.wait_stream(self._update_stream)

    def device_bytes(self) -> int:
        """Returns the number of bytes of weights that are permanently on the device: the resident part of the shard at
        ZeRO 3, and all weights of the group at ZeRO 0 to 2."""
        shard = self._shard if self.offloaded is None else self.offloaded.resident
        numel = self.layout.numel if self.layout.zero_stage < 3 else len(shard)
        return numel * self._full.element_size()

    def _start_all_gather(self, parts: list[torch.Tensor]) -> None:
        """Allocates the buffer of the full weights, and starts the all-gather into it. `parts` are the parts of this
        rank's shard, in order."""
        layout = self.layout
        self.full.untyped_storage().resize_(layout.numel * self.full.element_size())
        shard = parts[0]
        if len(parts) > 1:
            shard = self.full[layout.shard_range]
            for into, part in zip(shard.split([len(part) for part in parts]), parts, strict=True):
                into.copy_(part)
        self._all_gather_work = all_gather(self.full, shard, layout.shard_group, sizes=layout.shard_sizes)
