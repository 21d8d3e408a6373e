"""The layout of a flat parameter group: the position of each tensor in the flat buffer, and the range of the buffer
that this rank stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import nn

from meshwright.runtime.comm.compression import FlatSlice
from meshwright.runtime.comm.group import CommGroup, ShardPlacement
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.optimizer_shard import ParamRun
from meshwright.spec.layout import BucketLayout, bucket_gaps, shard_bounds


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Describes one flat parameter group of this rank. Made by `make_flat_layout`, and immutable."""

    bucket: BucketLayout
    parameters: dict[str, nn.Parameter]
    context: ParallelContext
    placement: ShardPlacement
    shard_range: slice
    """The range of elements of the flat buffer that this rank updates."""
    frozen: bool
    """Whether no parameter is trained. Such a group has no gradients, no main weights and no reduction."""
    tied: bool
    """Whether another stage has a replica of the group, so that the gradients of both are summed."""

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset of each tensor in the flat buffer."""
        return self.bucket.offsets

    @property
    def numel(self) -> int:
        """The number of elements of the flat buffer."""
        return self.bucket.numel

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the plan."""
        return self.context.plan.zero

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are reduced after each backward pass of a step (ZeRO 2 and 3), which frees the full buffer.
        Otherwise they are reduced after the last pass."""
        return self.zero_stage >= 2

    @property
    def shard_group(self) -> CommGroup | None:
        """The ranks that store the shards of one replica."""
        return self.placement.shard_group

    @property
    def shard_numel(self) -> int:
        """The number of elements of this rank's shard."""
        return self.shard_range.stop - self.shard_range.start

    @property
    def shard_sizes(self) -> list[int] | None:
        """The number of elements of every shard, if they are unequal; otherwise None."""
        if not self.placement.weights:
            return None
        bounds = shard_bounds(self.numel, self.placement.shards, self.placement.weights)
        return [stop - start for start, stop in pairwise(bounds)]

    def gaps(self) -> list[slice]:
        """The ranges of the flat buffer that belong to no tensor."""
        return bucket_gaps(self.bucket, {name: parameter.numel() for name, parameter in self.parameters.items()})

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor `name` as a view of the full flat buffer `flat`."""
        parameter, offset = self.parameters[name], self.offsets[name]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def shard_slice(self, name: str) -> slice:
        """Returns the range of this rank's shard that belongs to the tensor `name`. Empty if there is none."""
        first = self.offsets[name]
        last = first + self.parameters[name].numel()
        start, stop = self.shard_range.start, self.shard_range.stop
        return slice(max(first, start) - start, max(min(last, stop) - start, 0))

    def flat_slice(self, run: slice, like: torch.Tensor) -> FlatSlice:
        """Returns the range `run` of the flat buffer, with the tensors of the buffer."""
        tensors = [(offset, tuple(self.parameters[name].shape)) for name, offset in self.offsets.items()]
        return FlatSlice(run.start, run.stop, like, tensors)

    def allocate(self, numel: int, shared: bool, dtype: torch.dtype, tied: bool = False) -> torch.Tensor:
        """Returns a buffer of zeros. It is in shared memory if other ranks of this host read it."""
        memory, placement = self.context.shared_memory, self.placement
        if memory is not None and (tied or (shared and (placement.shard_group or placement.replicate_group))):
            return memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.context.device)

    def shard_runs(self, groups: Mapping[str, int]) -> list[ParamRun]:
        """Returns the segments of the shard. A segment contains either matrices or vectors (biases and norms), all of
        one optimizer group, and the padding after them. Segments end only at multiples of ALIGN_NUMEL, because fused
        kernels round differently after the last full SIMD vector of a segment. So each element rounds identically under
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
