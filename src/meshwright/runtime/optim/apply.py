"""The optimizer step over the flat parameter groups of this rank: jointly, by chunks, by full tensors, or offloaded.

torch's optimizers skip parameters without a gradient. So groups whose gradients or weights exist in the dtype of the
update only temporarily are passed to the optimizer chunk by chunk (shard/optimizer_shard.py), and all others jointly.
Offloaded states are updated chunk by chunk, with any elementwise optimizer of torch.

Parameters without a gradient on any rank are skipped, as torch does for a gradient of None: [Note: skipped parameters]
of shard/optimizer_shard.py, and `GradReducer.unused`.

[Note: first update] An optimizer creates its states when it first updates a parameter, one by one, and they are then
stored together: all at once would need twice the memory. So the first update of torch's own optimizers, which count
steps per parameter, goes by chunks in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from itertools import pairwise

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.host_heap import malloc_trim
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.optim.param_groups import SubsetStep, step_subsets
from meshwright.runtime.shard.low_bit import LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedChunk, OffloadedShard
from meshwright.runtime.shard.optimizer_shard import OptimizerShard, ShardParam, TensorExtent, nested_optimizers
from meshwright.runtime.zero.param_group import FlatParamGroup


def check_skippable(optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Raises InputError if the tensors `names` must be skipped and the optimizer has lists of parameters other than its
    groups: it would not see the parts that these are cut into."""
    for inner in nested_optimizers(optimizer) if names else ():
        for key, value in vars(inner).items():
            parts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            if any(isinstance(part, ShardParam) for part in parts):
                raise InputError(
                    Message(
                        "no gradient came to {names}, and {type} has parameters in {key} besides those of its "
                        "param_groups, so that it cannot skip this one as torch's optimizers do: read param_groups in "
                        "its step, or freeze {names} before parallelize",
                        names=min(names),
                        type=type(inner).__name__,
                        key=key,
                    )
                )


def skip_params(unit: FlatParamGroup, names: Set[str], stateless: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Skips the tensors `names` in the next update of `unit`. `stateless`: tensors that every update before it has
    skipped."""
    if unit.optim_shard.full_tensor_step is not None:
        unit.optim_shard.full_tensor_step.skipped = names
        return
    isolate_skipped_params(unit, names, optimizer)
    mark_skipped(unit, names, stateless)


def mark_skipped(unit: FlatParamGroup, names: Set[str], stateless: Set[str]) -> None:
    """Marks the parameters to skip, once they are isolated."""
    for run in unit.optim_shard.isolated:
        run.skipped, run.stateless = run.path in names, run.path in stateless


def isolate_skipped_params(unit: FlatParamGroup, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Cuts the optimizer's parameters so that each tensor of `unit` in `names` has its own."""
    shard_range = unit.shard_range
    new = (names & unit.layout.offsets.keys()) - {run.path for run in unit.optim_shard.isolated} if names else names
    if not new or shard_range.stop == shard_range.start:
        return
    # A tensor without elements begins where the next one does: it has no extent.
    begins = sorted((offset, name) for name, offset in unit.layout.offsets.items() if unit.parameters[name].numel())
    starts = [
        shard_range.start,
        *(min(max(offset, shard_range.start), shard_range.stop) for offset, _ in begins[1:]),
        shard_range.stop,
    ]
    extents = [
        TensorExtent(first - shard_range.start, last - shard_range.start, name)
        for (first, last), (_, name) in zip(pairwise(starts), begins, strict=True)
    ]
    local = [each for each in extents if each.start < each.stop]
    if new & {each.name for each in local}:
        unit.optim_shard.isolate(optimizer, local, new)


TRIM_INTERVAL_CHUNKS = 4
"""Chunks of new states between two calls of malloc_trim."""


def needs_own_step(unit: FlatParamGroup) -> bool:
    """Whether `unit` is not updated jointly with others."""
    shard = unit.optim_shard
    upcasts = isinstance(shard, LowBitShard) or unit.grad_shard.dtype != shard.flat.dtype
    return upcasts or shard.full_tensor_step is not None or any(run.needs_new_state for run in shard.isolated)


def apply_update(
    units: Iterable[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float, step: int, first: bool
) -> None:
    """Updates `units` with gradients times `scale`. `step` counts the steps of the run. `first`: no update of this
    process came before."""
    together: list[FlatParamGroup] = []
    separately: list[FlatParamGroup] = []
    for unit in units:
        (separately if needs_own_step(unit) else together).append(unit)
    creates_states = first and not optimizer.state
    with step_subsets(optimizer) as subset_step:
        if creates_states and type(optimizer).__module__.startswith("torch.optim."):
            separately = together + separately
        else:
            _update_jointly(together, optimizer, scale)
        for unit in separately:
            if unit.optim_shard.full_tensor_step is not None:
                _update_full_tensors(unit, optimizer, subset_step, scale)
            else:
                _update_by_chunk(unit, optimizer, subset_step, scale, step, creates_states)
            unit.copy_to_params()
            if creates_states:
                malloc_trim()


def _update_jointly(units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float) -> None:
    for unit in units:
        if scale != 1.0:
            unit.grad_shard.mul_(scale)
        unit.optim_shard.set_grad(unit.grad_shard)
    if units:
        optimizer.step()
    for unit in units:
        unit.optim_shard.clear_grad()
        unit.optim_shard.link_new_states(optimizer)
        unit.copy_to_params()


def _update_full_tensors(
    unit: FlatParamGroup, optimizer: torch.optim.Optimizer, subset_step: SubsetStep, scale: float
) -> None:
    tensors = unit.optim_shard.full_tensor_step
    assert tensors is not None
    subset_step(tensors.parameters)
    tensors.step(optimizer, unit.optim_shard.flat, _upcast_grad(unit.grad_shard, unit.optim_shard, scale))


def _update_by_chunk(
    unit: FlatParamGroup,
    optimizer: torch.optim.Optimizer,
    subset_step: SubsetStep,
    scale: float,
    step: int,
    creates_states: bool,
) -> None:
    shard = unit.optim_shard
    for number, chunk in enumerate(shard.iter_chunks(), 1):
        shard.upcast(optimizer, step, chunk)
        shard.set_grad(_upcast_grad(unit.grad_shard[chunk.elements], shard, scale), chunk.runs)
        subset_step.step(shard.params[chunk.runs])
        shard.clear_grad(chunk.runs)
        shard.downcast(optimizer, chunk)
        if creates_states and number % TRIM_INTERVAL_CHUNKS == 0:
            malloc_trim()


def _upcast_grad(gradients: torch.Tensor, shard: OptimizerShard, scale: float) -> torch.Tensor:
    """Returns gradients times `scale` in the dtype of the update, in place if they already have it."""
    upcast = gradients.to(shard.compute_dtype)
    return upcast.mul_(scale) if scale != 1.0 else upcast


OFFLOADED_TRIM_INTERVAL_CHUNKS = 16
"""Chunks of new offloaded states between two calls of malloc_trim."""


def apply_offloaded_update(
    swapper: StateSwapper, units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float
) -> None:
    """Updates `units` with gradients times `scale`. When it returns, all weights are updated; the last states may still
    be in flight to storage."""
    swapper.copy_streams.wait_for_compute()  # copies start after the compute that uses them
    chunks = _offloaded_chunks(units)
    with step_subsets(optimizer) as subset_step:

        def update(chunk: OffloadedChunk) -> None:
            chunk.set_grad(scale)
            subset_step.step(chunk.params)
            if chunk.clear_grad(optimizer) and chunk.index % OFFLOADED_TRIM_INTERVAL_CHUNKS == 0:
                malloc_trim()

        swapper.run_pipelined(chunks, update)
    if any(
        unit.optim_shard.has_main_params or unit.optim_shard.in_file
        for unit in units
        if isinstance(unit.optim_shard, OffloadedShard)
    ):
        swapper.quiesce()  # the last chunks write weights


def prefetch_states(swapper: StateSwapper, units: Sequence[FlatParamGroup]) -> None:
    """Starts fetching the first states during backward. Gradients of an accelerator are copied to the host once they
    are complete."""
    if not swapper.is_prefetching and units and isinstance(units[0].optim_shard, OffloadedShard):
        swapper.prefetch(_offloaded_chunks(units, complete=False))


def _offloaded_chunks(units: Sequence[FlatParamGroup], complete: bool = True) -> list[OffloadedChunk]:
    """Returns all offloaded chunks. `complete`: gradients are complete."""
    chunks: list[OffloadedChunk] = []
    for unit in units:
        assert isinstance(unit.optim_shard, OffloadedShard)
        unit.optim_shard.unmap()
        for chunk in unit.optim_shard.chunks:
            chunk.gradients = unit.grad_shard[chunk.unit_range] if complete else None
            chunk.grads_on_host = unit.host_grads is not None
            chunks.append(chunk)
    return chunks
