"""Stores the gradients of a flat parameter group, counts them, and sums them over the data-parallel ranks.
`FlatParamGroup` (param_group.py) uses these classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from meshwright.runtime.comm.async_collectives import (
    COMPLETED_WORK,
    CollectiveWork,
    all_reduce,
    reduce_scatter,
    uses_shared_memory,
)
from meshwright.runtime.comm.compression import ReducerPair
from meshwright.runtime.offload.param_swapper import CpuGradBuffer
from meshwright.runtime.zero.exact_sum import FixedPointAccumulator
from meshwright.runtime.zero.group_weights import FlatLayout
from meshwright.spec.enums import Offload
from meshwright.spec.precision import Recipe


class GradCounter:
    """Counts the gradients of a step with `expected` backward passes. Each pass computes one gradient per parameter.
    `passes`: number of passes in which all parameters have a gradient. `counts`: number of gradients of each parameter
    so far. `started`: names of the parameters whose current sum already contains a gradient. The cost per gradient does
    not depend on the number of parameters."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.reset(1)

    def reset(self, expected: int) -> None:
        """Resets the counts for a step of `expected` backward passes."""
        self.expected, self.counts = expected, dict.fromkeys(self.counts, 0)
        self.started: set[str] = set()
        self._set_passes(0)

    def mark(self, name: str) -> bool:
        """Counts one gradient of `name`. Returns whether all parameters now have a gradient of the current pass.

        >>> found = GradCounter("ab")
        >>> [found.mark(name) for name in "abba"], found.passes
        ([False, True, False, True], 2)
        """
        self.counts[name] += 1
        self._missing -= self.counts[name] == self.passes + 1
        if self._missing:
            return False
        self._set_passes(self.passes + 1)
        return True

    def complete(self, passes: int) -> dict[str, int]:
        """Ends pass number `passes`. Parameters without a gradient in this pass are counted as if they had a gradient.
        Returns the previous counts of these parameters.

        >>> found = GradCounter("ab")
        >>> found.mark("a"), found.complete(1), found.passes, found.complete(1)
        (False, {'b': 0}, 1, {})
        """
        if self.passes >= passes:
            return {}
        missing = {name: count for name, count in self.counts.items() if count < passes}
        self.counts |= dict.fromkeys(missing, passes)
        self._set_passes(passes)
        return missing

    def start(self, name: str) -> bool:
        """Returns whether the next gradient of `name` is the first in its sum, and marks the sum as started."""
        first = name not in self.started
        self.started.add(name)
        return first

    def restart_sums(self) -> None:
        """Makes the next gradient of each parameter the first in a new sum. Called when the reduction of the current
        sums starts."""
        self.started = set()

    def _set_passes(self, passes: int) -> None:
        self.passes, self._missing = passes, sum(count == passes for count in self.counts.values())


GRAD_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Maps `Recipe.reduced`, the number of bytes per element in which gradients are reduced, to a dtype."""


class GroupGradients:
    """The gradients of one parameter group. `buffer` is a flat tensor with the gradients that this rank stores: all
    gradients of the group (ZeRO 0 and 1), or this rank's shard (ZeRO 2 and 3). `shard` contains the gradients for this
    rank's update. The gradients of all micro-batches are summed. They are already divided by the number of labels of
    the whole batch."""

    def __init__(self, layout: FlatLayout, recipe: Recipe) -> None:
        """Allocates the buffers. Gradients are stored, summed and sent in one dtype."""
        self.layout = layout
        self.exact = FixedPointAccumulator(recipe, layout.context.device) if recipe.exact else None
        self.counter = GradCounter(layout.offsets)
        self.host: CpuGradBuffer | None = None
        """The buffer of gradients that are offloaded to CPU. None if they are not offloaded."""
        self._full: torch.Tensor | None = None
        self._has_sum = False
        """Whether gradients have already been reduced in this step (ZeRO 2 and 3). If so, the results of later
        reductions are added to `buffer`."""
        self._gaps = layout.gaps()
        self._views: dict[str, torch.Tensor] = {}
        """The tensors in `buffer` by parameter name (ZeRO 0 and 1), made once: `buffer` never changes."""
        dtype = self.exact.dtype if self.exact is not None else _grad_dtype(recipe)
        if layout.frozen:
            self.buffer = self.shard = layout.allocate(0, False, dtype)
            return
        size = layout.numel if layout.zero_stage < 2 else layout.shard_numel
        swapper = layout.context.state_swapper
        if swapper is not None and swapper.has_device_memory and Offload.gradients in layout.context.plan.offload:
            self.host = CpuGradBuffer(swapper, size, dtype)
            self.buffer = self.shard = self.host.values
            return
        is_read_by_others = layout.zero_stage < 2 or layout.placement.replicate_group is not None
        self.buffer = layout.allocate(size, is_read_by_others, dtype, layout.tied)
        self.shard = self._shard_of_buffer()

    def _shard_of_buffer(self) -> torch.Tensor:
        return self.buffer[self.layout.shard_range] if self.layout.zero_stage < 2 else self.buffer

    def begin_step(self, arrivals: int) -> None:
        """Prepares for a step in which each parameter gets `arrivals` gradients, one per backward pass."""
        plan = self.layout.context.plan
        self.counter.reset(arrivals)
        self._full, self._has_sum = None, False  # an aborted backward pass may have left a buffer
        if self.exact is not None:
            self.exact.begin_step(sum(plan.shares) or arrivals * plan.dp)
            self.shard = self._shard_of_buffer()

    def slot(self, name: str) -> tuple[torch.Tensor, bool]:
        """Returns the view of the gradient buffer in which gradients of `name` are summed, and whether the next
        gradient is the first in the sum. The first gradient must overwrite the view."""
        first = self.counter.start(name)
        if self.layout.zero_stage >= 2:
            return self.layout.view(self._full_buffer(), name), first
        if name not in self._views:
            self._views[name] = self.layout.view(self.buffer, name)
        return self._views[name], first

    def mark_unused_ready(self, passes: int) -> bool:
        """Ends backward pass number `passes`. A parameter without a gradient in this pass gets a gradient of zero.
        Returns whether this completes the gradients of the group, so that the caller must reduce the group."""
        missing = self.counter.complete(passes)
        if not missing:
            return False
        for into, first in map(self.slot, missing):
            if first:
                into.zero_()
        return self.is_reduced_after(passes)

    def is_reduced_after(self, passes: int) -> bool:
        """Returns whether the group is reduced after backward pass number `passes`."""
        return self.layout.reduces_each_pass or passes == self.counter.expected

    def _full_buffer(self) -> torch.Tensor:
        """Returns the full gradient buffer of one backward pass at ZeRO 2 and 3. If the reduction uses shared memory,
        the buffer is in memory that the ranks of this host can read."""
        if self._full is None:
            layout, group = self.layout, self.layout.shard_group
            if group is not None and group.shm is not None and uses_shared_memory(group, layout.shard_sizes):
                self._full = group.shm.ordered_staging_buffer(layout.numel, self.buffer.dtype)
            else:
                self._full = torch.empty(layout.numel, dtype=self.buffer.dtype, device=layout.context.device)
            for gap in self._gaps:
                self._full[gap].zero_()
        return self._full

    def reduce(self, compressors: ReducerPair) -> CollectiveWork:
        """Starts to sum the gradients over ranks: over all data-parallel ranks at ZeRO 0, and over the shard group at
        ZeRO 1 to 3. At ZeRO 2 and 3 the result is added to this rank's shard. Returns the handle to wait for."""
        layout = self.layout
        if layout.zero_stage == 0:
            return all_reduce(self.buffer, layout.placement.replicate_group, inter_host=compressors.replicas)
        if layout.zero_stage == 1:
            return reduce_scatter(self.buffer, self.shard, layout.shard_group, compressors.shards, layout.shard_sizes)
        full = self._full
        assert full is not None
        first, host = not self._has_sum, self.host
        self._full, self._has_sum = None, True
        self.counter.restart_sums()
        out = self.buffer if first and host is None else full.new_empty(self.buffer.shape)
        scattering = reduce_scatter(full, out, layout.shard_group, compressors.shards, layout.shard_sizes)

        def finish() -> None:
            scattering.wait()
            if host is not None:
                host.accumulate(out, first)
            elif not first:
                self.buffer.add_(out)

        return CollectiveWork(None, finish)

    def reduce_over_replicas(self, compressors: ReducerPair) -> CollectiveWork:
        """Starts to sum the gradient shards over replicas at ZeRO 1 to 3, once per step. Returns the handle to wait
        for."""
        group = self.layout.placement.replicate_group
        if self.host is not None:
            return CollectiveWork(None, partial(self.host.all_reduce, group, compressors.replicas))
        return (
            all_reduce(self.shard, group, inter_host=compressors.replicas) if self.layout.zero_stage else COMPLETED_WORK
        )

    def dequantize(self) -> None:
        """Converts integer sums to floating-point gradients. The sums must be complete over all ranks."""
        if self.exact is not None:
            self.shard = self.exact.dequantize(self.shard)

    def device_bytes(self) -> int:
        """Returns the number of bytes of gradients on the device."""
        return self.buffer.nbytes if self.host is None else 0


def _grad_dtype(recipe: Recipe) -> torch.dtype:
    """Returns the dtype in which gradients of `recipe` are stored and reduced."""
    compute: torch.dtype = getattr(torch, recipe.compute)
    return GRAD_DTYPES.get(recipe.reduced, compute)
