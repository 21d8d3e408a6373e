"""The parameters of one or several layers as one flat buffer, with their gradients and their optimizer shard (FSDP's
FSDPParamGroup).

[Note: ZeRO is three settings] ZeRO stages differ only in which of three buffers is a shard, 1 / (dp_shard x cp) of the
whole:

| stage | weights | gradients | main weights and optimizer states |
|---|---|---|---|
| 0 | full | full | full |
| 1 | full | full | shard |
| 2 | full | shard | shard |
| 3 | shard, gathered for use | shard | shard |

Source: Rajbhandari et al., ZeRO (2020). Gradients are sums, already divided by the number of labels of the whole batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import nn

from meshwright.analysis.dry_run import without_write_recording
from meshwright.runtime.comm.async_collectives import (
    COMPLETED_WORK,
    CollectiveWork,
    all_gather,
    all_reduce,
    reduce_scatter,
    uses_shared_memory,
)
from meshwright.runtime.comm.compression import FlatSlice, ReducerPair, make_compressed_reducer
from meshwright.runtime.comm.group import ShardPlacement, without_replicas
from meshwright.runtime.deferred_init import materialize
from meshwright.runtime.offload.param_swapper import CpuGradBuffer, NvmeShard, SplitShard, split_shard
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.access_guard import AccessGuard, sharded_weight_message
from meshwright.runtime.shard.low_bit import LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedShard
from meshwright.runtime.shard.optimizer_shard import FrozenShard, OptimizerShard, ParamRun
from meshwright.runtime.wgrad.accumulation import accumulate_into
from meshwright.runtime.wgrad.deferred import WgradQueue
from meshwright.runtime.zero.exact_sum import FixedPointAccumulator
from meshwright.runtime.zero.shared_weights import make_shared_weights
from meshwright.spec.enums import Offload
from meshwright.spec.layout import BucketLayout, bucket_gaps, offload_splits, shard_bounds
from meshwright.spec.precision import GradientCompression, Recipe


class GradCounter:
    """Counts the gradients of a step in which `expected` passes compute one gradient per parameter. `counts`: gradients
    so far, by parameter. `started`: parameters whose sum has begun. The cost per gradient does not depend on the
    number of parameters."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.reset(1)

    def reset(self, expected: int) -> None:
        """Starts a step of `expected` backward passes."""
        self.expected, self.counts = expected, dict.fromkeys(self.counts, 0)
        self.started: set[str] = set()
        self._set_passes(0)

    def mark(self, name: str) -> bool:
        """Counts one more gradient of `name`. Returns whether it was the last of a pass.

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
        """Ends pass number `passes`: parameters without a gradient count as complete. Returns these and their counts
        before.

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

    def _set_passes(self, passes: int) -> None:
        self.passes, self._missing = passes, sum(count == passes for count in self.counts.values())


GRAD_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Gradient dtypes, by bytes per element of the recipe's reductions."""


class GradReadiness(Protocol):
    """What a parameter group reports its gradients to (reducer.py). `passes`: completed backward passes. `received`:
    parameters with a gradient in this step."""

    passes: int
    received: set[str]

    def mark_ready(self, unit: FlatParamGroup) -> None:
        """All gradients of `unit` are accumulated."""

    def divert_to_probe(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether a preflight check takes the gradient instead."""

    def mark_unused(self, unit: FlatParamGroup) -> None:
        """No more gradients of `unit` come in this pass."""


class FlatParamGroup:
    """A flat parameter group. `shard_range` is the range of elements that this rank updates."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: dict[str, nn.Parameter],
        mesh: ParallelContext,
        recipe: Recipe,
        placement: ShardPlacement,
        groups: Mapping[str, int],
        tied: bool = False,
    ) -> None:
        """`groups` gives the optimizer's group of each parameter name. `tied`: gradients are summed with those of
        another stage's replica."""
        self.layout, self.parameters, self.mesh = layout, parameters, mesh
        self.zero_stage = mesh.plan.zero
        self.dtype = getattr(torch, recipe.compute)
        self.exact = FixedPointAccumulator(recipe, mesh.device) if recipe.exact else None
        self.placement = placement = placement if recipe.local is None else without_replicas(placement)
        self.shard_group = placement.shard_group
        bounds = shard_bounds(layout.numel, placement.shards, placement.weights)
        self.shard_range = slice(*bounds[placement.shard : placement.shard + 2])
        self.grad_counter = GradCounter(layout.offsets)
        self._full_grads: torch.Tensor | None = None
        self.host_grads: CpuGradBuffer | None = None  # gradients offloaded to CPU
        self.reducer: GradReadiness | None = None
        self.wgrad_queue: WgradQueue | None = None
        self._gaps = bucket_gaps(layout, {name: parameter.numel() for name, parameter in parameters.items()})
        self._all_gather_work: CollectiveWork | None = None
        self.access_guard = AccessGuard(parameters, sharded_weight_message(mesh.plan.name))
        self.hooked = False
        self.frozen = not any(
            each.requires_grad for each in parameters.values()
        )  # no gradients, no main weights, no reduction
        self._init_params()
        self._init_grads(GRAD_DTYPES.get(recipe.reduced, self.dtype) if self.exact is None else self.exact.dtype, tied)
        self._init_optim_shard(recipe, groups)
        self.compressors = _make_reducer_pair(self, recipe.compression)
        for name, parameter in parameters.items() if not self.frozen else ():
            parameter.register_post_accumulate_grad_hook(self._grad_hook(name))

    # --- construction

    def _init_params(self) -> None:
        offloads = {Offload.parameters, Offload.parameters_disk} & set(self.mesh.plan.offload)
        self.shared = (
            make_shared_weights(self.mesh.shared_memory, self.shard_group, self.layout.numel, self.dtype)
            if self.zero_stage == 3 and not offloads
            else None
        )
        if self.shared is not None:
            self.weights = self.shared.full
        else:
            self.weights = _allocate_buffer(self, self.layout.numel, self.zero_stage in (1, 2), self.dtype)
        for name, parameter in self.parameters.items():
            view = self.view(self.weights, name)
            view.copy_(materialize(parameter))
            parameter.data = view
        shard = self.weights[self.shard_range]
        self.parts = (
            self.mesh.state_swapper.split(len(shard), self.frozen)
            if self.mesh.state_swapper is not None
            else offload_splits(len(shard), 0, 0)
        )
        self.offloaded: SplitShard | None = None  # the shard, if some of its weights are offloaded
        if self.shared is not None:
            self._param_shard = shard
            self.shared.attach(self.parameters.values())
            self.shared.barrier().wait()  # every rank has written its shard
            self.reshard()
        elif self.zero_stage == 3:
            if self.mesh.state_swapper is not None:
                self.offloaded = split_shard(
                    self.mesh.state_swapper, Offload.parameters_disk in offloads, shard, self.parts
                )
            if self.offloaded is None:
                self._param_shard = _allocate_buffer(self, len(shard), True, self.dtype)
                self._param_shard.copy_(shard)
            self.reshard()
        else:
            self._param_shard = shard

    @property
    def storages(self) -> list[torch.Tensor | NvmeShard]:
        """The weights of each part of the shard, where they are stored."""
        return (
            [self._param_shard[part.start : part.stop] for part in self.parts]
            if self.offloaded is None
            else self.offloaded.storages(self.parts)
        )

    def _init_grads(self, dtype: torch.dtype, tied: bool) -> None:
        """Allocates gradients of type `dtype`, in which they are stored, summed and sent."""
        if self.frozen:
            self.gradients = self.grad_shard = _allocate_buffer(self, 0, False, dtype)
            return
        size = self.layout.numel if self.zero_stage < 2 else self.shard_range.stop - self.shard_range.start
        swapper = self.mesh.state_swapper
        if swapper is not None and swapper.has_device_memory and Offload.gradients in self.mesh.plan.offload:
            self.host_grads = CpuGradBuffer(swapper, size, dtype)
            self.gradients = self.grad_shard = self.host_grads.values
            return
        self.gradients = _allocate_buffer(
            self, size, self.zero_stage < 2 or self.placement.replicate_group is not None, dtype, tied
        )
        self.grad_shard = self.gradients[self.shard_range] if self.zero_stage < 2 else self.gradients

    def _init_optim_shard(self, recipe: Recipe, groups: Mapping[str, int]) -> None:
        """Creates what the optimizer updates: the shard of the weights, or a float32 copy of it."""
        self.has_main_params = bool(recipe.master) and not self.frozen
        runs, storages, swapper = _shard_runs(self, groups), self.storages, self.mesh.state_swapper
        in_files = Offload.parameters_disk in self.mesh.plan.offload
        if swapper is not None and not self.frozen and (swapper.optimizer or (in_files and not self.has_main_params)):
            dtype = torch.float32 if self.has_main_params else self.dtype
            self.optim_shard: OptimizerShard = OffloadedShard(swapper, storages, dtype, runs, self.parts)
            self.has_main_params = self.optim_shard.has_main_params
            return
        main_params = [each.full() if isinstance(each, NvmeShard) else each for each in storages]
        if self.has_main_params:  # also if weights are offloaded
            main_params = [torch.cat([each.to(self.mesh.device, torch.float32) for each in main_params])]
        low_bit = (recipe.rounds or recipe.eight) and not self.frozen
        self.optim_shard = (
            FrozenShard(main_params)
            if len(main_params) > 1
            else LowBitShard(main_params[0], runs, recipe.rounds)
            if low_bit
            else OptimizerShard(main_params[0], runs)
        )

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor `name` inside a full flat buffer."""
        parameter = self.parameters[name]
        offset = self.layout.offsets[name]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    # --- gradients

    def _grad_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """Returns the gradient hook of `name`. It references the group weakly: autograd stores hooks outside of the
        garbage collector's reach, so a cycle would never be freed."""
        unit = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            gradient, owner = parameter.grad, unit()
            if gradient is None or owner is None:
                return
            parameter.grad = None
            if owner.wgrad_queue is not None:
                owner.wgrad_queue.push(name, lambda: gradient)
            else:
                owner.accumulate_grad(name, gradient)

        return take

    def accumulate_grad(self, name: str, gradient: torch.Tensor) -> None:
        """Accumulates a gradient of one backward pass. Reductions between hosts make progress meanwhile, since nothing
        else advances them before the next group is ready."""
        if self.reducer is not None and self.reducer.divert_to_probe(name, gradient):
            return
        group = self.shard_group or self.placement.replicate_group
        if group is not None and group.shm is not None and group.process_group is not None:
            group.shm.progress_queue.progress()
        if self.exact is not None:
            gradient = self.exact.quantize(gradient)
        complete = self.grad_counter.mark(name)
        count = self.grad_counter.counts[name]
        if self.reducer is not None:
            self.reducer.received.add(name)
            assert count <= self.reducer.passes + 1, f"a gradient of {name} arrived after its group was complete"
        accumulate_into(*self.grad_slot(name), gradient)
        if complete and (self.zero_stage >= 2 or count == self.grad_counter.expected) and self.reducer is not None:
            self.reducer.mark_ready(self)

    def grad_slot(self, name: str) -> tuple[torch.Tensor, bool]:
        """Returns where the gradients of `name` are summed, and whether the current one is the first there."""
        first = name not in self.grad_counter.started
        self.grad_counter.started.add(name)
        return self.view(self.gradients if self.zero_stage < 2 else self._grad_buffer(), name), first

    def mark_unused_ready(self, passes: int) -> bool:
        """Ends backward pass number `passes`: parameters without a gradient count as zero. Returns whether that
        completes the group."""
        missing = self.grad_counter.complete(passes)
        if not missing:
            return False
        for into, first in map(self.grad_slot, missing):
            if first:
                into.zero_()
        return self.zero_stage >= 2 or passes == self.grad_counter.expected

    def _grad_buffer(self) -> torch.Tensor:
        """Returns the full gradient buffer of one backward pass at ZeRO 2 and 3, in memory that ranks of this host can
        read."""
        if self._full_grads is None:
            if (
                self.shard_group is not None
                and self.shard_group.shm is not None
                and uses_shared_memory(self.shard_group, _shard_sizes(self))
            ):
                self._full_grads = self.shard_group.shm.ordered_staging_buffer(self.layout.numel, self.gradients.dtype)
            else:
                self._full_grads = torch.empty(self.layout.numel, dtype=self.gradients.dtype, device=self.mesh.device)
            for gap in self._gaps:
                self._full_grads[gap].zero_()
        return self._full_grads

    def reduce(self) -> CollectiveWork:
        """Starts summing the gradients over the data ranks (at ZeRO 2 and 3 over the shard group only, where shards
        accumulate)."""
        if self.zero_stage == 0:
            return all_reduce(self.gradients, self.placement.replicate_group, inter_host=self.compressors.replicas)
        if self.zero_stage == 1:
            return reduce_scatter(
                self.gradients, self.grad_shard, self.shard_group, self.compressors.shards, _shard_sizes(self)
            )
        full = self._full_grads
        assert full is not None
        self._full_grads, self.grad_counter.started = None, set()
        first, host_grads = self.grad_counter.passes == 1, self.host_grads
        out = self.gradients if first and host_grads is None else full.new_empty(self.gradients.shape)
        scattering = reduce_scatter(full, out, self.shard_group, self.compressors.shards, _shard_sizes(self))

        def finish() -> None:
            scattering.wait()
            if host_grads is not None:
                host_grads.accumulate(out, first)
            elif not first:
                self.gradients.add_(out)

        return CollectiveWork(None, finish)

    def reduce_over_replicas(self) -> CollectiveWork:
        """Starts summing the gradient shards over the replicas, once per step, from ZeRO 1 on."""
        if self.host_grads is not None:
            return CollectiveWork(
                None, partial(self.host_grads.all_reduce, self.placement.replicate_group, self.compressors.replicas)
            )
        return (
            all_reduce(self.grad_shard, self.placement.replicate_group, inter_host=self.compressors.replicas)
            if self.zero_stage
            else COMPLETED_WORK
        )

    def begin_step(self, arrivals: int) -> None:
        """Prepares for `arrivals` backward passes."""
        self.grad_counter.reset(arrivals)
        self._full_grads = None  # drops the buffer of an aborted pass
        if self.exact is not None:
            self.exact.begin_step(sum(self.mesh.plan.shares) or arrivals * self.mesh.plan.dp)
            self.grad_shard = self.gradients[self.shard_range] if self.zero_stage < 2 else self.gradients

    # --- weights

    @without_write_recording
    def prefetch(self) -> None:
        """Starts all-gathering the weights (ZeRO 3); `unshard` waits for it."""
        if self.zero_stage < 3 or not self.access_guard.is_denied or self._all_gather_work is not None:
            return
        if self.shared is not None:
            self._all_gather_work = self.shared.barrier()
        elif self.offloaded is not None:
            self.offloaded.prefetch()
        else:
            _start_all_gather(self, [self._param_shard])

    @without_write_recording
    def unshard(self) -> None:
        """Makes the full weights available (ZeRO 3)."""
        if not self.access_guard.is_denied:
            return
        self.prefetch()
        if self.offloaded is not None:
            _start_all_gather(self, self.offloaded.acquire())
        assert self._all_gather_work is not None
        self._all_gather_work.wait()
        self._all_gather_work = None
        self.access_guard.allow()
        if self.shared is not None:
            self.shared.set_visible(True)
        if self.offloaded is not None:
            self.offloaded.release()

    @without_write_recording
    def reshard(
        self,
    ) -> None:
        """Frees the full weights (ZeRO 3). Views and saved tensors keep their storage, which `unshard` fills again.
        Weights shared in host memory are freed when the parameters release them."""
        if self.zero_stage < 3:
            return
        if self._all_gather_work is not None:
            self._all_gather_work.wait()
            self._all_gather_work = None
        if self.offloaded is not None:
            self.offloaded.release()
        if self.shared is not None:
            self.shared.set_visible(False)
        else:
            self.weights.untyped_storage().resize_(0)
        self.access_guard.deny()

    def copy_to_params(self) -> None:
        """Copies the updated main weights into the weights of the compute dtype."""
        self.optim_shard.commit_loaded_states()
        if not self.has_main_params:
            return
        parts = self.optim_shard.parts
        sizes = [part.stop - part.start for part in self.parts]
        for storage, part in zip(self.storages, parts[0].split(sizes) if len(parts) == 1 else parts, strict=True):
            storage.copy_(part) if isinstance(storage, torch.Tensor) else storage.write(part)

    def all_gather_params(self) -> CollectiveWork:
        """Starts all-gathering the updated shards into the full weights (ZeRO 1 and 2)."""
        return (
            all_gather(self.weights, self._param_shard, self.shard_group, sizes=_shard_sizes(self))
            if self.zero_stage in (1, 2)
            else COMPLETED_WORK
        )

    def device_bytes(self) -> tuple[int, int]:
        """Returns the bytes of weights and of gradients on the device."""
        shard = self._param_shard if self.offloaded is None else self.offloaded.resident
        weights = self.layout.numel if self.zero_stage < 3 else len(shard)
        return weights * self.weights.element_size(), self.gradients.nbytes if self.host_grads is None else 0


def _allocate_buffer(
    unit: FlatParamGroup, numel: int, shared: bool, dtype: torch.dtype, tied: bool = False
) -> torch.Tensor:
    """Returns a zeroed buffer, in shared memory if other ranks of this host read it."""
    if unit.mesh.shared_memory is not None and (
        tied or (shared and (unit.shard_group or unit.placement.replicate_group))
    ):
        return unit.mesh.shared_memory.zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=unit.mesh.device)


def _start_all_gather(unit: FlatParamGroup, parts: list[torch.Tensor]) -> None:
    """Starts all-gathering the weights from the `parts` of the shard, in order."""
    unit.weights.untyped_storage().resize_(unit.layout.numel * unit.weights.element_size())
    shard = parts[0]
    if len(parts) > 1:
        shard = unit.weights[unit.shard_range]
        for into, part in zip(shard.split([len(part) for part in parts]), parts, strict=True):
            into.copy_(part)
    unit._all_gather_work = all_gather(unit.weights, shard, unit.shard_group, sizes=_shard_sizes(unit))


def _shard_sizes(flat: FlatParamGroup) -> list[int] | None:
    """Returns the elements of all shards if they are unequal."""
    weights = flat.placement.weights
    return (
        [stop - start for start, stop in pairwise(shard_bounds(flat.layout.numel, flat.placement.shards, weights))]
        if weights
        else None
    )


def param_shard_range(unit: FlatParamGroup, name: str) -> slice:
    """Returns the elements of the shard that belong to the tensor `name`; empty if there are none."""
    first = unit.layout.offsets[name]
    last = first + unit.parameters[name].numel()
    return slice(
        max(first, unit.shard_range.start) - unit.shard_range.start,
        max(min(last, unit.shard_range.stop) - unit.shard_range.start, 0),
    )


def flat_slice(unit: FlatParamGroup, run: slice, like: torch.Tensor) -> FlatSlice:
    """Returns the range `run` of the flat buffer and the tensors of the buffer."""
    return FlatSlice(
        run.start,
        run.stop,
        like,
        [(offset, tuple(unit.parameters[name].shape)) for name, offset in unit.layout.offsets.items()],
    )


def _make_reducer_pair(unit: FlatParamGroup, compression: GradientCompression | None) -> ReducerPair:
    compression = None if unit.frozen else compression
    full = flat_slice(unit, slice(0, unit.layout.numel), unit.gradients)
    return ReducerPair(
        make_compressed_reducer(compression, unit.shard_group, full, True),
        make_compressed_reducer(
            compression, unit.placement.replicate_group, flat_slice(unit, unit.shard_range, unit.gradients), False
        ),
    )


def _shard_runs(flat: FlatParamGroup, groups: Mapping[str, int]) -> list[ParamRun]:
    """Cuts the shard into runs of matrices, or of vectors (biases and norms), of one optimizer group each, including
    the padding after them. Runs end at multiples of ALIGN_NUMEL only. Fused kernels round differently after the last
    full vector of a run, so each element is rounded identically under every plan."""
    offsets, shard_range = flat.layout.offsets, flat.shard_range
    tensors = sorted(
        ((name, tensor) for name, tensor in flat.parameters.items() if tensor.numel()),
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
    starts = [0, *(offsets[name] - shard_range.start for name in firsts[1:]), shard_range.stop - shard_range.start]
    named = [(flat.parameters[name].ndim > 1, name) for name in firsts] or [(True, "")]
    return [ParamRun(start, stop, *each) for (start, stop), each in zip(pairwise(starts), named, strict=True)]


def offloaded_bytes(units: Iterable[FlatParamGroup]) -> int:
    """Returns the bytes of states, gradients and weights of `units` that are offloaded to CPU or NVMe."""
    total = 0
    for unit in units:
        total += unit.optim_shard.offloaded_bytes() if isinstance(unit.optim_shard, OffloadedShard) else 0
        total += unit.gradients.nbytes if unit.host_grads is not None else 0
        total += unit.offloaded.bytes() if unit.offloaded is not None else 0
    return total
