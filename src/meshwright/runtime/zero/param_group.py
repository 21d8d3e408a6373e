"""Combines the parameters of one or several layers in one flat buffer, with their gradients and their optimizer shard.
`FlatParamGroup` corresponds to FSDP's FSDPParamGroup; the build creates the groups.

[Note: ZeRO is three settings] ZeRO stages differ in which of three buffers a rank stores in full, and of which it
stores only a shard. Unless the plan sets unequal shards, a shard is 1 / (dp_shard x cp) of the full buffer:

| stage | weights | gradients | main weights and optimizer states |
|---|---|---|---|
| 0 | full | full | full |
| 1 | full | full | shard |
| 2 | full | shard | shard |
| 3 | shard, gathered for use | shard | shard |

Source: Rajbhandari et al., ZeRO (2020). Gradients are summed over micro-batches and ranks. They are already divided by
the number of labels of the whole batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.async_collectives import CollectiveWork
from meshwright.runtime.comm.compression import ReducerPair, make_compressed_reducer
from meshwright.runtime.comm.group import ShardPlacement, without_replicas
from meshwright.runtime.offload.param_swapper import NvmeShard
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.low_bit import LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedShard
from meshwright.runtime.shard.optimizer_shard import FrozenShard, OptimizerShard
from meshwright.runtime.weight_gradients import WgradQueue, accumulate_into
from meshwright.runtime.zero.group_gradients import GroupGradients
from meshwright.runtime.zero.group_weights import FlatLayout, GroupWeights, make_flat_layout
from meshwright.spec.enums import Offload
from meshwright.spec.layout import BucketLayout
from meshwright.spec.precision import GradientCompression, Recipe


class GradReadiness(Protocol):
    """The interface to which a parameter group reports gradients; `StageReducer` in reducer.py implements it. `passes`:
    number of completed backward passes. `received`: names of the parameters with a gradient in this step."""

    passes: int
    received: set[str]

    def mark_ready(self, unit: FlatParamGroup) -> None:
        """Reports that all gradients of `unit` are accumulated."""

    def divert_to_probe(self, name: str, gradient: torch.Tensor) -> bool:
        """Passes the gradient to the running preflight check, if any. Returns whether a check is running. If so, the
        caller must not accumulate the gradient."""

    def mark_unused(self, unit: FlatParamGroup) -> None:
        """Reports that no further gradients of `unit` follow in this pass."""


class FlatParamGroup:
    """A flat parameter group: its layout, its weights (group_weights.py), its gradients (group_gradients.py), and the
    shard that the optimizer updates."""

    def __init__(
        self,
        bucket: BucketLayout,
        parameters: dict[str, nn.Parameter],
        context: ParallelContext,
        recipe: Recipe,
        placement: ShardPlacement,
        groups: Mapping[str, int],
        tied: bool = False,
    ) -> None:
        """`groups` maps each parameter name to the index of its optimizer group. `tied`: whether other stages have
        replicas of this group, so that the gradients of all replicas are summed."""
        placement = placement if recipe.local is None else without_replicas(placement)
        self.layout = make_flat_layout(bucket, parameters, context, placement, tied)
        stored = next(iter(parameters.values())).dtype
        is_packed = stored == torch.uint8  # the bytes of frozen weights in 4 bits (analysis/nf4.py)
        self.weights = GroupWeights(self.layout, stored if is_packed else getattr(torch, recipe.compute))
        self.gradients = GroupGradients(self.layout, recipe)
        self.optim_shard = make_optim_shard(self.layout, self.weights, recipe, groups)
        self.has_main_params = (
            self.optim_shard.has_main_params
            if isinstance(self.optim_shard, OffloadedShard)
            else bool(recipe.master) and not self.frozen
        )
        self.compressors = ReducerPair(None, None) if self.frozen else self._make_compressors(recipe.compression)
        self.reducer: GradReadiness | None = None
        self.wgrad_queue: WgradQueue | None = None
        self.hooked = False
        for name, parameter in parameters.items() if not self.frozen else ():
            parameter.register_post_accumulate_grad_hook(self._grad_hook(name))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by name."""
        return self.layout.parameters

    @property
    def placement(self) -> ShardPlacement:
        """Returns how the group is sharded and replicated over ranks."""
        return self.layout.placement

    @property
    def shard_range(self) -> slice:
        """Returns the range of elements of the flat buffer that this rank updates."""
        return self.layout.shard_range

    @property
    def frozen(self) -> bool:
        """Whether no parameter of the group is trained."""
        return self.layout.frozen

    # --- called once by the build

    def report_to(self, reducer: GradReadiness) -> None:
        """Reports gradients to `reducer` from now on."""
        assert self.reducer is None, "a group has one reducer"
        self.reducer = reducer

    def defer_wgrads(self) -> WgradQueue:
        """Defers the weight gradients of this group to the W actions of the schedule. Returns the queue of the deferred
        gradients."""
        if self.wgrad_queue is None:
            self.wgrad_queue = WgradQueue(self.accumulate_grad)
        return self.wgrad_queue

    def gather_for_use(self) -> bool:
        """Marks the group as one whose weights module wrappers gather. Returns whether it was already marked."""
        before, self.hooked = self.hooked, True
        return before

    # --- gradients

    def _grad_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """Returns the gradient hook of the parameter `name`. The hook has only a weak reference to the group. With a
        strong reference the group would never be freed, because the garbage collector does not see hooks that autograd
        stores."""
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
        """Accumulates the gradient of the parameter `name` from one backward pass. Also advances reductions between
        hosts, which would otherwise not progress until the next group is ready."""
        reducer, gradients = self.reducer, self.gradients
        if reducer is not None and reducer.divert_to_probe(name, gradient):
            return
        placement = self.layout.placement
        group = placement.shard_group or placement.replicate_group
        if group is not None and group.shm is not None and group.process_group is not None:
            group.shm.progress_queue.progress()
        if gradients.exact is not None:
            gradient = gradients.exact.quantize(gradient)
        complete = gradients.counter.mark(name)
        count = gradients.counter.counts[name]
        if reducer is not None:
            reducer.received.add(name)
            if count > reducer.passes + 1:
                raise InputError(
                    Message(
                        "the gradient of {name} arrived again after the gradients of its layer were complete: several "
                        "checkpoints with use_reentrant=True share this parameter; use use_reentrant=False, or "
                        "recompute in the plan (rc-full)",
                        name=name,
                    )
                )
        accumulate_into(*gradients.slot(name), gradient)
        if complete and gradients.is_reduced_after(count) and reducer is not None:
            reducer.mark_ready(self)

    def reduce(self) -> CollectiveWork:
        """Starts to sum the gradients over ranks (`GroupGradients.reduce`). Returns the handle to wait for."""
        return self.gradients.reduce(self.compressors)

    def reduce_over_replicas(self) -> CollectiveWork:
        """Starts to sum the gradient shards over the replicas, once per step. Returns the handle to wait for."""
        return self.gradients.reduce_over_replicas(self.compressors)

    @contextmanager
    def uncompressed(self) -> Iterator[None]:
        """Inside the context, sums gradients without compression. The residuals of error feedback do not change."""
        before, self.compressors = self.compressors, ReducerPair(None, None)
        try:
            yield
        finally:
            self.compressors = before

    def _make_compressors(self, compression: GradientCompression | None) -> ReducerPair:
        """Returns the reducers that compress traffic between hosts: one over the shard group, one over the replicas.
        With DiLoCo the second one reduces differences of main weights instead of gradients."""
        layout, buffer = self.layout, self.gradients.buffer
        full = layout.flat_slice(slice(0, layout.numel), buffer)
        shards = make_compressed_reducer(compression, layout.shard_group, full, True)
        group, like = layout.placement.replicate_group, buffer
        if compression is not None and layout.placement.diloco is not None:
            group, like = layout.placement.diloco.replicate_group, self.optim_shard.flat
        shard = layout.flat_slice(layout.shard_range, like)
        return ReducerPair(shards, make_compressed_reducer(compression, group, shard, False))

    # --- weights

    def copy_to_params(self) -> None:
        """Copies the updated main weights into the compute weights. Also stores the states of a loaded checkpoint
        (`commit_loaded_states`)."""
        self.optim_shard.commit_loaded_states()
        if self.has_main_params:
            self.weights.write(self.optim_shard.parts)


def make_optim_shard(
    layout: FlatLayout, weights: GroupWeights, recipe: Recipe, groups: Mapping[str, int]
) -> OptimizerShard:
    """Returns the shard that the optimizer updates: the shard of the weights, or a float32 copy of that shard. `groups`
    maps each parameter name to the index of its optimizer group."""
    has_main_params = bool(recipe.master) and not layout.frozen
    runs, storages, swapper = layout.shard_runs(groups), weights.storages, layout.context.state_swapper
    in_files = Offload.parameters_disk in layout.context.plan.offload
    if swapper is not None and not layout.frozen and (swapper.optimizer or (in_files and not has_main_params)):
        dtype = torch.float32 if has_main_params else weights.dtype
        return OffloadedShard(swapper, storages, dtype, runs, weights.parts)
    main_params = [each.full() if isinstance(each, NvmeShard) else each for each in storages]
    if has_main_params:  # main weights stay on the device even if weights are offloaded
        main_params = [torch.cat([each.to(layout.context.device, torch.float32) for each in main_params])]
    if len(main_params) > 1:
        return FrozenShard(main_params)
    if (recipe.rounds or recipe.eight) and not layout.frozen:
        return LowBitShard(main_params[0], runs, recipe.rounds)
    return OptimizerShard(main_params[0], runs)


def offloaded_bytes(units: Iterable[FlatParamGroup]) -> int:
    """Returns the number of bytes of states, gradients and weights of `units` that are offloaded to CPU or NVMe."""
    total = 0
    for unit in units:
        total += unit.optim_shard.offloaded_bytes() if isinstance(unit.optim_shard, OffloadedShard) else 0
        total += unit.gradients.buffer.nbytes if unit.gradients.host is not None else 0
        total += unit.weights.offloaded.bytes() if unit.weights.offloaded is not None else 0
    return total
