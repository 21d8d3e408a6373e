"""Runs the optimizer step over the flat parameter groups of this rank. The trainer calls `Updater.step` once per
training step.

Usually one call of torch's optimizer updates all groups. A group is updated in chunks (`ShardChunk` in
shard/optimizer_shard.py) if its gradients, weights or states are temporarily converted to the dtype of the update. It
is also updated in chunks if the update creates states for tensors that all earlier updates have skipped. Groups with
offloaded states are always updated in chunks, with any elementwise optimizer. optim/full_tensor.py updates full
tensors.

Parameters without a gradient on any rank (`GradReducer.unused`) are skipped, as torch does for a gradient of None
([Note: skipped parameters] in shard/optimizer_shard.py).

[Note: first update] An optimizer creates the states of a parameter in the parameter's first update. The states are then
copied into one tensor per kind of state. If the states of all parameters were copied at once, they would need twice
their memory. So with torch's own optimizers, which count steps per parameter, the first update always runs in chunks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.async_collectives import CollectiveWork
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.optim.full_tensor import FullTensorStep
from meshwright.runtime.optim.param_groups import FullParam, SubsetStep, step_subsets
from meshwright.runtime.optim.rule_probe import folds_scale
from meshwright.runtime.shard.low_bit import GlobalIndex, LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedChunk, OffloadedShard, inverse_scale, scale_gradients
from meshwright.runtime.shard.optimizer_shard import OptimizerShard, ShardParam, TensorExtent, nested_optimizers
from meshwright.runtime.shard.shard_table import ShardTable
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import GradReducer


class Updater:
    """Updates the weights of this rank from the reduced gradients."""

    def __init__(self, reducer: GradReducer, full_tensor_steps: Mapping[int, FullTensorStep]) -> None:
        """`full_tensor_steps`: the update of each parameter group that the optimizer needs as full tensors, by the `id`
        of the group."""
        self.reducer, self._full_tensor_steps = reducer, full_tensor_steps
        self.stateless: frozenset[str] = frozenset()
        """Names of the parameters that all updates so far have skipped. The optimizer has no states for these
        parameters."""
        self._has_updated = False
        self._gathers: list[CollectiveWork] = []
        weakref.finalize(self, _await_gathers, self._gathers)

    def full_tensor_step(self, unit: FlatParamGroup) -> FullTensorStep | None:
        """Returns the full-tensor update of `unit`, or None if the optimizer updates flat segments of `unit`."""
        return self._full_tensor_steps.get(id(unit))

    def params_of(self, unit: FlatParamGroup) -> Sequence[ShardParam | FullParam]:
        """Returns the parameters of `unit` for the optimizer: flat segments, or the full tensors that this rank
        owns."""
        full_tensors = self.full_tensor_step(unit)
        return unit.optim_shard.params if full_tensors is None else full_tensors.parameters

    def full_params(self) -> list[FullParam]:
        """Returns the full tensors that this rank owns."""
        return [
            each
            for unit in self.reducer.trainable
            if (full_tensors := self.full_tensor_step(unit)) is not None
            for each in full_tensors.parameters
        ]

    def optimizer_params(self) -> list[ShardParam | FullParam]:
        """Returns the parameters of all groups for the optimizer, or one empty parameter if this rank trains none."""
        params = [each for unit in self.reducer.trainable for each in self.params_of(unit)]
        return params or [ShardParam(torch.zeros(0), False)]

    def set_stateless(self, names: Iterable[str]) -> None:
        """Sets the names of the parameters without states. Called after an optimizer is created or its states are
        loaded."""
        self.stateless = frozenset(names)

    def set_rounding_seed(self, shards: ShardTable, seed: int) -> None:
        """Sets the seed of stochastic rounding. Random bits depend on the global index of an element, so they do not
        depend on the number of ranks."""
        for unit in self.reducer.trainable:
            if isinstance(unit.optim_shard, LowBitShard) and unit.optim_shard.stochastic:
                unit.optim_shard.set_rounding(tuple(global_indices(shards, unit)), seed)

    def step(self, optimizer: torch.optim.Optimizer, scale: float, step: int = 0) -> None:
        """Updates the weights with the gradients times `scale`. `step` is the index of the training step, on which
        stochastic rounding depends. All ranks call this method after `GradReducer.finish_gradients`.

        Raises:
            InputError: the optimizer cannot skip parameters without a gradient (`check_skippable`).
        """
        reducer = self.reducer
        reducer.quiesce()
        skipped, swapper = frozenset(reducer.unused), reducer.mesh.state_swapper
        check_skippable(optimizer, skipped)
        for unit in reducer.trainable:
            self._skip_params(unit, skipped, optimizer)
        if swapper is not None and any(isinstance(unit.optim_shard, OffloadedShard) for unit in reducer.trainable):
            apply_offloaded_update(swapper, reducer.trainable, optimizer, scale)
        else:
            self._update_resident(optimizer, scale, step)
        self._has_updated, self.stateless = True, self.stateless & skipped
        self._gathers[:] = [unit.weights.all_gather_async() for unit in reducer.trainable]
        for unit, pending in zip(reducer.trainable, self._gathers, strict=True):
            if not unit.weights.is_gathering:
                pending.wait()
        # When the step returns, user code may write to the weights, so no rank may still be reading them. A write waits
        # for an overlapped all-gather.
        if reducer.mesh.plan.zero in (1, 2):
            reducer.quiesce(finish_gathers=False)

    def _skip_params(self, unit: FlatParamGroup, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
        """Makes the next update of `unit` skip those of its tensors that are in `names`."""
        full_tensors = self.full_tensor_step(unit)
        if full_tensors is not None:
            full_tensors.skip(names)
            return
        isolate_skipped_params(unit, names, optimizer)
        mark_skipped(unit, names, self.stateless)

    def _update_resident(self, optimizer: torch.optim.Optimizer, scale: float, step: int) -> None:
        """Updates all groups whose states are on the device."""
        together: list[FlatParamGroup] = []
        separately: list[FlatParamGroup] = []
        for unit in self.reducer.trainable:
            needs_own_step = self.full_tensor_step(unit) is not None or is_updated_by_chunk(unit)
            (separately if needs_own_step else together).append(unit)
        creates_states = not (self._has_updated or optimizer.state)
        with step_subsets(optimizer) as subset_step:
            if creates_states and type(optimizer).__module__.startswith("torch.optim."):
                separately = together + separately
            else:
                _update_jointly(together, optimizer, scale)
            for unit in separately:
                full_tensors = self.full_tensor_step(unit)
                if full_tensors is not None:
                    subset_step(full_tensors.parameters)
                    gradients = _upcast_grad(unit.gradients.shard, unit.optim_shard, scale)
                    full_tensors.step(optimizer, unit.optim_shard.flat, gradients)
                else:
                    _update_by_chunk(unit, optimizer, subset_step, scale, step, creates_states)
                unit.copy_to_params()
                if creates_states:
                    malloc_trim()


MAX_EXIT_SECONDS = 10.0
"""The longest time that an ending process waits for other ranks to receive its weights."""


def _await_gathers(works: Sequence[CollectiveWork]) -> None:
    """Waits at the end of a process, or of its use of a model, until no other rank receives weights of the last update
    from it. If an error ends the process, other ranks may have ended too; then the works are complete or time out."""
    end = time.monotonic() + MAX_EXIT_SECONDS
    while time.monotonic() < end and not all(work.is_done for work in works):
        time.sleep(0.001)


def check_skippable(optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Raises InputError if there are tensors to skip (`names`) and an attribute of the optimizer, other than its
    groups, contains parameters. A skipped tensor gets a new parameter in the groups, but the attribute would still
    contain the old parameter."""
    for inner in nested_optimizers(optimizer) if names else ():
        for key, value in vars(inner).items():
            parts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            if any(isinstance(part, ShardParam) for part in parts):
                raise InputError(
                    Message(
                        "{names} got no gradient, and {type} also stores parameters in its attribute {key}, outside "
                        "of param_groups, so it cannot skip {names} as torch's optimizers do: read param_groups in its "
                        "step, or freeze {names} before parallelize",
                        names=min(names),
                        type=type(inner).__name__,
                        key=key,
                    )
                )


def mark_skipped(unit: FlatParamGroup, names: Set[str], stateless: Set[str]) -> None:
    """Marks the isolated parameters that the next update skips (`names`), and those that all earlier updates have
    skipped (`stateless`)."""
    for run in unit.optim_shard.isolated:
        run.skipped, run.stateless = run.path in names, run.path in stateless


def isolate_skipped_params(unit: FlatParamGroup, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Splits the optimizer's parameters so that each tensor of `unit` in `names` has a separate parameter."""
    shard_range = unit.shard_range
    new = (names & unit.layout.offsets.keys()) - {run.path for run in unit.optim_shard.isolated} if names else names
    if not new or shard_range.stop == shard_range.start:
        return
    # Tensors without elements are excluded, because they would have the offset of the next tensor.
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
"""Number of chunks with new states between two calls of malloc_trim."""


def is_updated_by_chunk(unit: FlatParamGroup) -> bool:
    """Returns whether `unit` is updated in chunks instead of in the joint call."""
    shard = unit.optim_shard
    upcasts = isinstance(shard, LowBitShard) or unit.gradients.shard.dtype != shard.flat.dtype
    return upcasts or any(run.needs_new_state for run in shard.isolated)


def _update_jointly(units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float) -> None:
    folds = scale != 1.0 and folds_scale(optimizer)
    for unit in units:
        if scale != 1.0 and not folds:
            scale_gradients(unit.gradients.shard, scale)
        unit.optim_shard.set_grad(unit.gradients.shard)
    if folds and units:  # the kernel of the update scales the gradients while it reads them
        optimizer.grad_scale = torch.full((), inverse_scale(scale), device=units[0].gradients.shard.device)  # type: ignore[attr-defined]
    try:
        if units:
            optimizer.step()
    finally:
        vars(optimizer).pop("grad_scale", None)
    for unit in units:
        unit.optim_shard.clear_grad()
        unit.optim_shard.link_new_states(optimizer)
        unit.copy_to_params()


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
        shard.set_grad(_upcast_grad(unit.gradients.shard[chunk.elements], shard, scale), chunk.runs)
        subset_step.step(shard.params[chunk.runs])
        shard.clear_grad(chunk.runs)
        shard.downcast(optimizer, chunk)
        if creates_states and number % TRIM_INTERVAL_CHUNKS == 0:
            malloc_trim()


def _upcast_grad(gradients: torch.Tensor, shard: OptimizerShard, scale: float) -> torch.Tensor:
    """Returns gradients times `scale` in the dtype of the update. Gradients of this dtype are changed in place."""
    upcast = gradients.to(shard.compute_dtype)
    return scale_gradients(upcast, scale) if scale != 1.0 else upcast


OFFLOADED_TRIM_INTERVAL_CHUNKS = 16
"""Number of chunks with new offloaded states between two calls of malloc_trim."""


def apply_offloaded_update(
    swapper: StateSwapper, units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float
) -> None:
    """Updates `units` with gradients times `scale`. On return all weights are updated, but the last states may still be
    being stored."""
    swapper.copy_streams.wait_for_compute()  # copies read gradients that queued compute work still writes
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
        swapper.quiesce()  # the weights of the last chunks are still being stored


def prefetch_states(swapper: StateSwapper, units: Sequence[FlatParamGroup]) -> None:
    """Starts to fetch the first offloaded states during backward. If gradients must be copied to the host, they are
    copied later, when backward has completed them."""
    if not swapper.is_prefetching and units and isinstance(units[0].optim_shard, OffloadedShard):
        swapper.prefetch(_offloaded_chunks(units, complete=False))


def _offloaded_chunks(units: Sequence[FlatParamGroup], complete: bool = True) -> list[OffloadedChunk]:
    """Returns the chunks of all `units`. `complete`: whether backward has completed the gradients. If so, sets the
    gradients of the chunks."""
    chunks: list[OffloadedChunk] = []
    for unit in units:
        assert isinstance(unit.optim_shard, OffloadedShard)
        unit.optim_shard.unmap()
        for chunk in unit.optim_shard.chunks:
            chunk.gradients = unit.gradients.shard[chunk.unit_range] if complete else None
            chunk.grads_on_host = unit.gradients.host is not None
            chunks.append(chunk)
    return chunks


def global_indices(shards: ShardTable, unit: FlatParamGroup) -> Iterator[GlobalIndex]:
    """Yields the global indices of the elements of `unit` that this rank updates: one `GlobalIndex` for each tensor."""
    for name, offset in unit.layout.offsets.items():
        start = max(offset, unit.shard_range.start)
        stop = min(offset + unit.parameters[name].numel(), unit.shard_range.stop)
        if start >= stop:
            continue
        spec = shards.params[name]
        before = spec.expert_offset(unit.parameters[name].numel())
        at = start - unit.shard_range.start
        if spec.tp_split is None:
            yield GlobalIndex(name, at, start - offset, stop - start, before)
            continue
        shape, dim = spec.global_shape, spec.tp_split.dim
        rows = torch.cat([torch.arange(first, last) for first, last in spec.intervals()])
        if spec.is_expert:
            # `before` counts elements of one tensor rank's shard. The global tensor has the shards of all tensor ranks.
            before *= spec.tp_ranks
        yield GlobalIndex(name, at, start - offset, stop - start, before, rows, shape[dim], shape[dim + 1 :].numel())
