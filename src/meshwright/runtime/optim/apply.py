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
    if unit.master.tensors is not None:
        unit.master.tensors.skipped = names
        return
    isolate_skipped_params(unit, names, optimizer)
    mark_skipped(unit, names, stateless)


def mark_skipped(unit: FlatParamGroup, names: Set[str], stateless: Set[str]) -> None:
    """As `skip`, of a unit whose runs are cut so."""
    for run in unit.master.single:
        run.skipped, run.stateless = run.path in names, run.path in stateless


def isolate_skipped_params(unit: FlatParamGroup, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Runs of the optimizer hold elements of those tensors of `unit` that are in `names` one by one."""
    own = unit.own
    new = (names & unit.unit.offsets.keys()) - {run.path for run in unit.master.single} if names else names
    if not new or own.stop == own.start:
        return
    # A tensor without elements begins where the next one does: it has no extent.
    begins = sorted((offset, name) for name, offset in unit.unit.offsets.items() if unit.parameters[name].numel())
    starts = [own.start, *(min(max(offset, own.start), own.stop) for offset, _ in begins[1:]), own.stop]
    extents = [
        TensorExtent(first - own.start, last - own.start, name)
        for (first, last), (_, name) in zip(pairwise(starts), begins, strict=True)
    ]
    here = [each for each in extents if each.start < each.stop]
    if new & {each.name for each in here}:
        unit.master.separate(optimizer, here, new)


TRIM_INTERVAL_CHUNKS = 4
"""Windows whose states, as the optimizer made them, are left in the heap before that is given back."""


def needs_own_step(unit: FlatParamGroup) -> bool:
    """Whether `unit` is not updated together with others."""
    master = unit.master
    wide = isinstance(master, LowBitShard) or unit.own_gradients.dtype != master.flat.dtype
    return wide or master.tensors is not None or any(run.fresh for run in master.single)


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
            if unit.master.tensors is not None:
                _update_full_tensors(unit, optimizer, few, scale)
            else:
                _update_by_chunk(unit, optimizer, few, scale, step, makes)
            unit.write_back()
            if makes:
                malloc_trim()


def _update_jointly(units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float) -> None:
    for unit in units:
        if scale != 1.0:
            unit.own_gradients.mul_(scale)
        unit.master.give(unit.own_gradients)
    if units:
        optimizer.step()
    for unit in units:
        unit.master.take_back()
        unit.master.adopt(optimizer)
        unit.write_back()


def _update_full_tensors(unit: FlatParamGroup, optimizer: torch.optim.Optimizer, few: SubsetStep, scale: float) -> None:
    tensors = unit.master.tensors
    assert tensors is not None
    few(tensors.parameters)
    tensors.update(optimizer, unit.master.flat, _upcast_grad(unit.own_gradients, unit.master, scale))


def _update_by_chunk(
    unit: FlatParamGroup, optimizer: torch.optim.Optimizer, few: SubsetStep, scale: float, step: int, makes: bool
) -> None:
    master = unit.master
    for number, window in enumerate(master.few_at_a_time(), 1):
        master.widen(optimizer, step, window)
        master.give(_upcast_grad(unit.own_gradients[window.elements], master, scale), window.runs)
        few.step(master.runs[window.runs])
        master.take_back(window.runs)
        master.narrow(optimizer, window)
        if makes and number % TRIM_INTERVAL_CHUNKS == 0:
            malloc_trim()


def _upcast_grad(gradients: torch.Tensor, master: OptimizerShard, scale: float) -> torch.Tensor:
    """Times `scale`, in the type of the update; in place where they have it."""
    wide = gradients.to(master.computed)
    return wide.mul_(scale) if scale != 1.0 else wide


OFFLOADED_TRIM_INTERVAL_CHUNKS = 16
"""Windows whose fresh states may lie around in the heap before it is given back."""


def apply_offloaded_update(
    away: StateSwapper, units: Sequence[FlatParamGroup], optimizer: torch.optim.Optimizer, scale: float
) -> None:
    """Gradients times `scale` through the optimizer; when this returns all weights are updated, while the last states
    may still be written."""
    away.ferry.follow()  # gradients come down, and weights go up, behind what reads them
    windows = _offloaded_chunks(units)
    with step_subsets(optimizer) as few:

        def update(window: OffloadedChunk) -> None:
            window.give(scale)
            few.step(window.runs)
            if window.take_back(optimizer) and window.number % OFFLOADED_TRIM_INTERVAL_CHUNKS == 0:
                malloc_trim()

        away.pass_by(windows, update)
    if any(unit.master.copies or unit.master.file for unit in units if isinstance(unit.master, OffloadedShard)):
        away.settle()  # the weights are written with the last windows


def prefetch_states(away: StateSwapper, units: Sequence[FlatParamGroup]) -> None:
    """The first states come while backward runs, from its first gradients on; those of an accelerator are brought down
    once all are known."""
    if not away.is_ahead and units and isinstance(units[0].master, OffloadedShard):
        away.ahead(_offloaded_chunks(units, known=False))


def _offloaded_chunks(units: Sequence[FlatParamGroup], known: bool = True) -> list[OffloadedChunk]:
    """All of them. `known`: nothing is added to gradients any more."""
    windows: list[OffloadedChunk] = []
    for unit in units:
        assert isinstance(unit.master, OffloadedShard)
        unit.master.let_go()
        for window in unit.master.windows:
            window.gradients = unit.own_gradients[window.of_unit] if known else None
            window.is_down = unit.on_host is not None
            windows.append(window)
    return windows
