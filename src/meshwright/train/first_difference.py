"""Locates the first module whose values differ between a step under the plan and the same step on one device.
`meshwright verify` uses it to explain a failed verification.

Every rank records its own forward and backward passes under the plan, and compares them with a record of the same step
on one device. Module outputs are compared in the order in which the forward calls end. Then the gradients of these
outputs and of the parameters are compared in the opposite order. The first difference beyond the tolerance is the
result.

Each rank compares the elements that it has: its rows of the batch, its features of a column-parallel layer, its slice
of the sequence. An output that matches no such slice is skipped, for example the output of this rank's attention heads.
A fault in a skipped module appears in the next row-parallel layer. The result is therefore the faulty module, or the
first comparable module after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.graph import TpSplit, local_shard
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.spec.grid import first_row
from meshwright.train.trainer import Trainer

ModuleCall = tuple[str, int]
"""The path of a module, and the index of the call among the calls of this module in one forward pass."""
OUTPUT_LABEL, GRADIENT_LABEL = "output", "gradient of the output"


@dataclass
class RecordedPass:
    """The outputs of modules in one forward, in the order in which the calls end, and the gradients of these
    outputs."""

    outputs: dict[ModuleCall, torch.Tensor] = field(default_factory=dict)
    gradients: dict[ModuleCall, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    owned: dict[int, torch.Tensor] = field(default_factory=dict)
    """The recorded tensors by `id()`. A module may return the output of its submodule unchanged, which must not be
    recorded twice. The references keep the ids unique."""

    def add(self, path: str, output: Any) -> None:
        """Records `output`, the return value of a call of the module at `path`: a tensor, or the first tensor of a
        tuple. Other outputs and integer tensors are ignored."""
        tensor = (
            next((one for one in output if isinstance(one, torch.Tensor)), None)
            if isinstance(output, tuple)
            else output
        )
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or id(tensor) in self.owned:
            return
        key = (path, self.calls[path])
        self.calls[path] += 1
        self.owned[id(tensor)] = tensor
        self.outputs[key] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.gradients.update({key: gradient.detach().clone()}))


class ModuleRecorder:
    """Forward hooks on every submodule of a model. They record outputs in `now`, and nothing while `now` is None."""

    def __init__(self, model: nn.Module) -> None:
        self.now: RecordedPass | None = None
        self.handles = [
            module.register_forward_hook(self._hook(path)) for path, module in model.named_modules() if path
        ]

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.now is not None and not isinstance(module, StagePlaceholder):
                self.now.add(path, output)

        return hook

    def end(self) -> None:
        """Removes the hooks."""
        self.now = None
        for handle in self.handles:
            handle.remove()


class ModuleDifference(NamedTuple):
    """A difference on `rank`. `path` is the module or parameter, `what` the compared value (output or gradient).
    `amount` is relative to the norm on one device. `time` orders differences: outputs in forward order, then gradients
    in backward order."""

    time: int
    amount: float
    path: str
    what: str
    rank: int

    def __str__(self) -> str:
        return f"first to differ: {self.what} of {self.path}, by {self.amount:.1e} on rank {self.rank}"


def find_first_difference(
    trainer: Trainer,
    batch: Mapping[str, Any],
    one: RecordedPass,
    gradients: Mapping[str, torch.Tensor],
    tolerance: float,
) -> ModuleDifference | None:
    """Returns the first module or parameter whose output or gradient under the plan differs from that on one device, or
    None. All ranks call it and return the same result. `tolerance`: the largest accepted relative difference.

    `batch` is the global batch. `one` is the recorded pass of this batch on one device. `gradients` has the parameter
    gradients on one device, by parameter name.
    """
    passes, ours = _record_plan_passes(trainer, batch)
    times = {key: time for time, key in enumerate(one.outputs)}
    found = _forward_differences(trainer, passes, one, times, tolerance)
    found += _backward_differences(trainer, passes, one, times, tolerance)
    found += _parameter_differences(ours, gradients, one, times, tolerance) if ours is not None else []
    return min((difference for rank in gather_objects(found) for difference in rank), default=None)


def _record_plan_passes(
    trainer: Trainer, batch: Mapping[str, Any]
) -> tuple[list[tuple[int, RecordedPass]], dict[str, torch.Tensor] | None]:
    """Runs forward and backward under the plan. Returns the recorded passes and the full parameter gradients (None
    except on rank 0). There is one recorded pass for each micro-batch and stage of this rank, as (index of the
    micro-batch's first row in the batch, recorded pass)."""
    plan, pipeline, place = trainer.plan, trainer.engine.pipeline, trainer.mesh.replica
    recorder, inner = ModuleRecorder(trainer.engine.model), pipeline.forward
    counts: dict[int, int] = defaultdict(int)
    passes: list[tuple[int, RecordedPass]] = []

    def forward(stage: int, *given: Any) -> Any:
        first = first_row(plan, len(next(iter(batch.values()))), place) + counts[stage] * plan.micro_batch_of(place)
        counts[stage] += 1
        recorder.now = RecordedPass()
        passes.append((first, recorder.now))
        try:
            return inner(stage, *given)
        finally:
            recorder.now = None  # a recompute in backward must not be recorded

    trainer.engine.preflight.skip(stages=False)  # preflight forward passes must not be recorded
    try:
        with pipeline.replace_forward(forward):
            ours = trainer.gradients(dict(batch))[2]
    finally:
        recorder.end()
    return passes, ours


def _forward_differences(
    trainer: Trainer,
    passes: list[tuple[int, RecordedPass]],
    one: RecordedPass,
    times: Mapping[ModuleCall, int],
    tolerance: float,
) -> list[ModuleDifference]:
    incomplete = _incomplete_modules(trainer.engine.model)
    return [
        ModuleDifference(times[key], off, key[0], OUTPUT_LABEL, _global_rank())
        for first, mine in passes
        for key, value in mine.outputs.items()
        if key in times
        and key[0] not in incomplete
        and (off := _local_difference(trainer, key[0], value, one.outputs[key], first)) is not None
        and off > tolerance
    ]


def _backward_differences(
    trainer: Trainer,
    passes: list[tuple[int, RecordedPass]],
    one: RecordedPass,
    times: Mapping[ModuleCall, int],
    tolerance: float,
) -> list[ModuleDifference]:
    """Returns the module outputs whose gradients differ. Their `time` orders them after all outputs, from the last
    module to the first. Unsharded tensors inside a tensor-parallel region are skipped, since each rank has only a
    partial sum of their gradient."""
    anatomy = trainer.engine.anatomy
    incomplete = _incomplete_modules(trainer.engine.model)
    parts = {name.rpartition(".")[0] for name in anatomy.partial} | {
        path for region in anatomy.regions for path in region.mla_inputs
    }
    shared = {path for region in anatomy.regions for path in (*region.columns, *region.rows)}
    inside = tuple(f"{region.module}." for region in anatomy.regions if region.module) if trainer.plan.tp > 1 else ()
    return [
        ModuleDifference(3 * len(times) - 2 * times[key], off, key[0], GRADIENT_LABEL, _global_rank())
        for first, mine in passes
        for key, value in mine.gradients.items()
        if key in one.gradients
        and key[0] not in incomplete
        and (trainer.plan.tp == 1 or key[0] in shared or not (key[0] in parts or key[0].startswith(inside)))
        and (off := _local_difference(trainer, key[0], value, one.gradients[key], first)) is not None
        and off > tolerance
    ]


def _parameter_differences(
    ours: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    one: RecordedPass,
    times: Mapping[ModuleCall, int],
    tolerance: float,
) -> list[ModuleDifference]:
    """Returns the parameters whose gradients differ. The `time` of a parameter is directly after the time of its
    module's output gradient, or after all other times if that module has no recorded output. Gradients that are almost
    zero are skipped: at most 1e-14 of the norm of all gradients."""
    whole = sum(float(value.double().square().sum()) for value in gradients.values()) ** 0.5
    found = []
    for name, value in gradients.items():
        if float(value.norm()) <= 1e-14 * whole or name not in ours:
            continue
        off = _relative_norm(ours[name], value)
        if off > tolerance:
            time = times.get((name.rpartition(".")[0], 0), -1)
            found.append(ModuleDifference(3 * len(times) - 2 * time + 1, off, name, "gradient", _global_rank()))
    return found


def _incomplete_modules(model: nn.Module) -> set[str]:
    """Returns the paths of modules with a submodule on another pipeline rank. On this rank, their outputs are
    incomplete."""
    absent = [path for path, module in model.named_modules() if isinstance(module, StagePlaceholder)]
    return {".".join(path.split(".")[:end]) for path in absent for end in range(1, len(path.split(".")))}


def _local_difference(trainer: Trainer, path: str, mine: torch.Tensor, whole: torch.Tensor, first: int) -> float | None:
    """Returns the relative difference between `mine` and the matching slice of `whole`, or None if no slice matches.
    `mine` and `whole` are the outputs of the module `path` on this rank and on one device. `first`: the index in the
    batch of the first row of `mine`."""
    plan, place, anatomy = trainer.plan, trainer.mesh.coords, trainer.engine.anatomy
    if whole.ndim != mine.ndim:
        return None
    if whole.shape[0] != mine.shape[0]:
        size = plan.micro_batch_of(trainer.mesh.replica)
        if mine.shape[0] != size:
            return None  # the first dimension is not the batch: the module flattens rows and positions
        whole = whole[first : first + size]
    different = [dim for dim in range(mine.ndim) if whole.shape[dim] != mine.shape[dim]]
    if not different:
        return _relative_norm(mine, whole) if plan.cp == 1 else None
    if len(different) > 1 or plan.tp == 1:
        return None
    split = anatomy.splits.get(f"{path}.weight")
    columns = {column for region in anatomy.regions for column in region.columns} | {anatomy.head}
    if path in columns and split is not None:
        whole = local_shard(whole, TpSplit(different[0], split.parts, split.ways), place.tp, plan.tp)
    elif plan.sequence_parallel and different == [1] and mine.shape[1] * plan.tp == whole.shape[1]:
        whole = whole.chunk(plan.tp, 1)[place.tp]
    return _relative_norm(mine, whole) if whole.shape == mine.shape else None


def _relative_norm(mine: torch.Tensor, whole: torch.Tensor) -> float:
    """Returns the norm of `mine` - `whole` divided by the norm of `whole`, or 0 if the norm of `whole` is at most
    1e-12. The result is infinite if `mine` is not finite or the shapes differ."""
    if mine.shape != whole.shape or not bool(mine.isfinite().all()):
        return float("inf")
    mine, whole = mine.double(), whole.double()
    return float((mine - whole).norm() / whole.norm()) if float(whole.norm()) > 1e-12 else 0.0


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
