"""Parameters that an update skips because no gradient came to them on any rank, as torch's optimizers skip a parameter
whose gradient is None.

How runs of an optimizer skip them: [Note: skipped parameters] of master.py. Which ones: `GradReducer.unreached`.

The update of this rank's flat units: all at once, or a few runs at a time where what is kept is not what is computed
in.

torch's optimizers pass over parameters without a gradient: so units whose gradients or weights exist in the type of the
update for a moment
only are given to the optimizer window by window (master.py), and all others at once.

[Note: first update] An optimizer makes its states when it first updates a run, each by itself, and they are then laid
together: all of them at
once would be held twice. So the first update of torch's own optimizers, which count steps for each run, goes by
windows, whatever is kept.

The update of units whose states are away: window by window through any elementwise optimizer of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from itertools import pairwise

import torch

from meshwright.core.errors import InputError
from meshwright.runtime.host_heap import malloc_trim
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.optim.param_groups import SubsetStep, step_subsets
from meshwright.runtime.shard.low_bit import LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedChunk, OffloadedShard
from meshwright.runtime.shard.optimizer_shard import OptimizerShard, ShardParam, TensorExtent, nested_optimizers
from meshwright.runtime.zero.param_group import FlatParamGroup


def check_skippable(optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Raises InputError where the tensors `names` are to be skipped and the optimizer has lists of its parameters
    besides its groups: it would not see the
    parts that these are cut into."""
    for one in nested_optimizers(optimizer) if names else ():
        for key, value in vars(one).items():
            parts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            if any(isinstance(part, ShardParam) for part in parts):
                raise InputError(
                    f"no gradient came to {min(names)}, and {type(one).__name__} has parameters in {key} besides those of its param_groups, so that it cannot "
                    f"skip this one as torch's optimizers do: read param_groups in its step, or freeze {min(names)} before parallelize"
                )


def skip_params(unit: FlatParamGroup, names: Set[str], stateless: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """The next update of `unit` has no gradient for the tensors `names`. `stateless`: tensors that every update before
    it has skipped."""
    if unit.optim_shard.full_tensor_step is not None:
        unit.optim_shard.full_tensor_step.skipped = names
        return
    isolate_skipped_params(unit, names, optimizer)
    mark_skipped(unit, names, stateless)


def mark_skipped(unit: FlatParamGroup, names: Set[str], stateless: Set[str]) -> None:
    """As `skip`, of a unit whose runs are cut so."""
    for run in unit.optim_shard.isolated:
        run.skipped, run.stateless = run.path in names, run.path in stateless


def isolate_skipped_params(unit: FlatParamGroup, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Runs of the optimizer hold elements of those tensors of `unit` that are in `names` one by one."""
    own = unit.shard_range
    new = (names & unit.layout.offsets.keys()) - {run.path for run in unit.optim_shard.isolated} if names else names
    if not new or own.stop == own.start:
        return
    # A tensor without elements begins where the next one does: it has no extent.
    begins = sorted((offset, name) for name, offset in unit.layout.offsets.items() if unit.parameters[name].numel())
    starts = [own.start, *(min(max(offset, own.start), own.stop) for offset, _ in begins[1:]), own.stop]
    extents = [
        TensorExtent(first - own.start, last - own.start, name)
        for (first, last), (_, name) in zip(pairwise(starts), begins, strict=True)
    ]
    here = [each for each in extents if each.start < each.stop]
    if new & {each.name for each in here}:
        unit.optim_shard.isolate(optimizer, here, new)


TRIM_INTERVAL_CHUNKS = 4
"""Windows whose states, as the optimizer made them, are left in the heap before that is given back."""


def needs_own_step(unit: FlatParamGroup) -> bool:
    """Whether `unit` is not updated together with others."""
    master = unit.optim_shard
    wide = isinstance(master, LowBitShard) or unit.grad_shard.dtype != master.flat.dtype
    return wide or master.full_tensor_step is not None or any(run.needs_new_state for run in master.isolated)


def apply_update(
    units: Iterable[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float, step: int, first: bool
) -> None:
    """Gradients times `scale` through the optimizer; `step` counts those of the run. `first`: no update of this process
    came before."""
    together: list[FlatParamGroup] = []
    alone: list[FlatParamGroup] = []
    for unit in units:
        (alone if needs_own_step(unit) else together).append(unit)
    makes = first and not optimizer.state
    with step_subsets(optimizer) as few:
        if makes and type(optimizer).__module__.startswith("torch.optim."):
            alone = together + alone
        else:
            _update_jointly(together, optimizer, scale)
        for unit in alone:
            if unit.optim_shard.full_tensor_step is not None:
                _update_full_tensors(unit, optimizer, few, scale)
            else:
                _update_by_chunk(unit, optimizer, few, scale, step, makes)
            unit.copy_to_params()
            if makes:
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


def _update_full_tensors(unit: FlatParamGroup, optimizer: torch.optim.Optimizer, few: SubsetStep, scale: float) -> None:
    tensors = unit.optim_shard.full_tensor_step
    assert tensors is not None
    few(tensors.parameters)
    tensors.step(optimizer, unit.optim_shard.flat, _upcast_grad(unit.grad_shard, unit.optim_shard, scale))


def _update_by_chunk(
    unit: FlatParamGroup, optimizer: torch.optim.Optimizer, few: SubsetStep, scale: float, step: int, makes: bool
) -> None:
    master = unit.optim_shard
    for number, window in enumerate(master.iter_chunks(), 1):
        master.upcast(optimizer, step, window)
        master.set_grad(_upcast_grad(unit.grad_shard[window.elements], master, scale), window.runs)
        few.step(master.params[window.runs])
        master.clear_grad(window.runs)
        master.downcast(optimizer, window)
        if makes and number % TRIM_INTERVAL_CHUNKS == 0:
            malloc_trim()


def _upcast_grad(gradients: torch.Tensor, master: OptimizerShard, scale: float) -> torch.Tensor:
    """Times `scale`, in the type of the update; in place where they have it."""
    wide = gradients.to(master.compute_dtype)
    return wide.mul_(scale) if scale != 1.0 else wide


OFFLOADED_TRIM_INTERVAL_CHUNKS = 16
"""Windows whose fresh states may lie around in the heap before it is given back."""


def apply_offloaded_update(
    away: StateSwapper, units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float
) -> None:
    """Gradients times `scale` through the optimizer; when this returns all weights are updated, while the last states
    may still be written."""
    away.copy_streams.wait_for_compute()  # gradients come down, and weights go up, behind what reads them
    windows = _offloaded_chunks(units)
    with step_subsets(optimizer) as few:

        def update(window: OffloadedChunk) -> None:
            window.set_grad(scale)
            few.step(window.params)
            if window.clear_grad(optimizer) and window.index % OFFLOADED_TRIM_INTERVAL_CHUNKS == 0:
                malloc_trim()

        away.run_pipelined(windows, update)
    if any(
        unit.optim_shard.has_main_params or unit.optim_shard.in_file
        for unit in units
        if isinstance(unit.optim_shard, OffloadedShard)
    ):
        away.quiesce()  # the weights are written with the last windows


def prefetch_states(away: StateSwapper, units: Sequence[FlatParamGroup]) -> None:
    """The first states come while backward runs, from its first gradients on; those of an accelerator are brought down
    once all are known."""
    if not away.is_prefetching and units and isinstance(units[0].optim_shard, OffloadedShard):
        away.prefetch(_offloaded_chunks(units, known=False))


def _offloaded_chunks(units: Sequence[FlatParamGroup], known: bool = True) -> list[OffloadedChunk]:
    """All of them. `known`: nothing is added to gradients any more."""
    windows: list[OffloadedChunk] = []
    for unit in units:
        assert isinstance(unit.optim_shard, OffloadedShard)
        unit.optim_shard.unmap()
        for window in unit.optim_shard.chunks:
            window.gradients = unit.grad_shard[window.unit_range] if known else None
            window.grads_on_host = unit.host_grads is not None
            windows.append(window)
    return windows
