"""Checks what the user's code (forward, backward and hooks) writes to parameters and buffers in a pass. If the values
would differ from those of one device, the plan is refused. step_checks.py schedules the check.

One device makes one pass per step, with all rows (samples) and full weights. In the table, "parts" means the
micro-batches of all replicas. "Weights updated in place" means ZeRO 2 at most, no separate main weights, and no
offloaded optimizer states. "Equal" means equal to one device.

| what the code writes to | plan | outcome |
|---|---|---|
| a parameter's storage (`.data = ...`) | all except ZeRO 3 with shared weights | refused: the update would miss it |
| anything else | one process, one micro-batch, no recompute, weights updated in place | equal: same as one device |
| a parameter, independent of the rows | dp, one micro-batch, no recompute, weights updated in place | equal |
| a parameter | all other plans | refused |
| an embedding with `max_norm` | one process, weights updated in place | equal: a second renormalisation has no effect |
| an embedding with `max_norm` | all other plans | refused, because ranks renormalise only the rows that they read |
| a buffer of the state dict, in backward | several micro-batches | refused: each micro-batch would change it |
| a buffer of the state dict, with different values on different ranks | any | refused |
| a buffer, independent of the rows (a step count) | any | equal: the value of the first micro-batch, once per step |
| a buffer that the pass also reads | several micro-batches, recompute `full` | refused (batch_separability.py) |
| a buffer, depending on the rows (a running mean) | one part | equal, if tensor and context ranks write equal values |
| a buffer of the state dict, depending on the rows | several parts | refused |

The buffers of batch and instance norms are not checked here. Under tensor parallelism they contain only the channels of
their rank.

Method: one micro-batch runs forward and backward in training mode. Then, from the same initial state, a second batch
runs: two or three copies of the first row, each rolled differently, so that the rows and their number differ from those
of the first run. A dispatch mode records writes to parameters (analysis/dry_run.py). A comparison of values finds
writes to buffers. All values are restored afterwards. A buffer that depends on the rows and is not in the state dict is
permitted, unless the next pass depends on it. batch_separability.py checks whether the next pass depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.analysis.random_projection import random_projection
from meshwright.analysis.run_conditions import set_seed
from meshwright.core.errors import PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.engine import Engine, OncePerStepBuffers
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.batch_separability import isolated_pass
from meshwright.runtime.preflight.numeric_probes import record_fingerprint
from meshwright.runtime.preflight.row_batches import repeat_first_row_rolled
from meshwright.runtime.shard.offloaded import OffloadedShard
from meshwright.spec.enums import Recompute

WRITE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative tolerance, by dtype, for the comparison of the values that ranks write. For shorter dtypes it is 2e-2."""


class PassWrites(NamedTuple):
    """The parameters and buffers that a pass changes, as new values by name. `backward`: names of the buffers that the
    backward of the pass changes. `replaced`: names of the parameters to which the pass assigns a new storage."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    backward: frozenset[str]
    replaced: frozenset[str]


class WriteReport(NamedTuple):
    """Describes one tensor that a pass has written on one rank. `projected`: random projections of the new value.
    `is_row_independent`: whether different rows lead to the same value. `near`: relative tolerance for the comparison
    with other ranks. `backward`: whether the backward has changed the buffer. `replaced`: whether the parameter has a
    new storage."""

    is_parameter: bool
    projected: list[float]
    is_row_independent: bool
    near: float
    backward: bool
    replaced: bool


def is_single_device_step(engine: Engine, passes: int) -> bool:
    """Returns whether a step of `passes` micro-batches is one pass of one process, without recompute, with weights that
    are updated in place."""
    return (
        engine.mesh.plan.world == 1
        and passes == 1
        and engine.mesh.plan.recompute == Recompute.none
        and _updates_in_place(engine)
    )


def check_pass_writes(engine: Engine, batches: Sequence[Batch]) -> frozenset[str]:
    """Returns the names of the buffers that a pass changes independently of the rows. Every rank calls it.

    Raises:
        PlanRefused: the table in the module docstring refuses the plan. Every rank raises it.
    """
    if is_single_device_step(engine, len(batches)):
        return frozenset()
    renormed = _check_max_norm(engine)
    first = batches[0]
    own = _record_writes(engine, first)
    other = _record_writes(engine, repeat_first_row_rolled(first, 3 if num_rows(first) == 2 else 2))
    engine.preflight.written |= own.parameters.keys() | other.parameters.keys() | renormed
    mine = {
        name: _write_report(own, other, name, True)
        for name in (own.parameters.keys() | other.parameters.keys()) - renormed
    }
    stored = _checked_buffers(engine)
    mine |= {
        name: _write_report(own, other, name, False) for name in (own.buffers.keys() | other.buffers.keys()) & stored
    }
    everyone = gather_objects(mine)
    moved = set()
    for name in sorted({name for each in everyone for name in each}):
        said = [each[name] for each in everyone if name in each]
        _check_tensor_write(engine, name, said, len(batches))
        if not said[0].is_parameter and said[0].is_row_independent:
            moved.add(name)
    return frozenset(moved)


def _check_tensor_write(engine: Engine, name: str, said: Sequence[WriteReport], passes: int) -> None:
    plan, (first, *others) = engine.mesh.plan, said
    depends = not all(each.is_row_independent for each in said)
    different = any(not _is_close(first, each) for each in others)
    pieces = sum(plan.shares) or plan.dp * passes
    if any(each.replaced for each in said):
        raise _replaced_error(engine, name)
    if first.is_parameter:
        inside = (
            plan.tp == plan.cp == plan.pp == 1
            and _updates_in_place(engine)
            and plan.recompute == Recompute.none
            and passes == 1
        )
        if not inside or depends or different:
            raise PlanRefused(
                Message(
                    "plan {plan}: the model writes to its parameter {name} in forward or backward, and the passes of "
                    "this plan would leave a different value than the single pass of one device: write to it between "
                    "steps, or use dp1 with the batch as one micro-batch, ZeRO 2 at most, without recompute",
                    plan=plan.name,
                    name=name,
                )
            )
        return
    if depends and pieces > 1:
        raise PlanRefused(
            Message(
                "plan {plan}: the value of the buffer {name} depends on the rows of each pass, and this plan divides "
                "the batch into {pieces} parts, which would leave a different value than one device: use dp1 with "
                "the batch as one micro-batch, or register it with persistent=False if nothing reads it",
                plan=plan.name,
                name=name,
                pieces=pieces,
            )
        )
    if passes > 1 and any(each.backward for each in said):
        raise PlanRefused(
            Message(
                "plan {plan}: the backward changes the buffer {name}, and {passes} micro-batches would change it "
                "{passes} times: use one micro-batch",
                plan=plan.name,
                name=name,
                passes=passes,
            )
        )
    if different:
        raise PlanRefused(
            Message(
                "plan {plan}: ranks write different values to the buffer {name} in a pass, each from its own part of "
                "the weights or the sequence: use tp1 and cp1",
                plan=plan.name,
                name=name,
            )
        )


def _check_max_norm(engine: Engine) -> set[str]:
    """Returns the parameter names of the embeddings with `max_norm`. A plan with such embeddings must have one process
    that updates weights in place.

    Raises:
        PlanRefused: the model has such an embedding, and the plan has several processes or does not update weights in
        place.
    """
    plan, kinds = engine.mesh.plan, (nn.Embedding, nn.EmbeddingBag)
    found = [
        path for path, each in engine.model.named_modules() if isinstance(each, kinds) and each.max_norm is not None
    ]
    # Only one stage has the embedding. All ranks gather the names, so that all of them refuse the plan.
    found = [path for each in gather_objects(found) for path in each]
    if found and not (plan.world == 1 and _updates_in_place(engine)):
        raise PlanRefused(
            Message(
                "plan {plan}: {found} has max_norm, which renormalizes the rows that a pass reads, and each rank "
                "would renormalize different rows: use one process, or normalize the embedding where it is read "
                "(F.normalize)",
                plan=plan.name,
                found=found[0],
            )
        )
    return {f"{path}.weight" for path in found}


def _updates_in_place(engine: Engine) -> bool:
    """Returns whether the update writes directly to the tensors that a pass reads."""
    trained = engine.zero.trainable
    return engine.mesh.plan.zero < 3 and not any(
        unit.has_main_params or isinstance(unit.optim_shard, OffloadedShard) for unit in trained
    )


def _checked_buffers(engine: Engine) -> set[str]:
    """Returns the names of the state dict's buffers that this rank stores in full. Excludes the buffers of batch and
    instance norms, because a separate rule applies to their statistics."""
    norms = (nn.modules.batchnorm._NormBase,)
    of_norms = {
        f"{path}.{name}"
        for path, each in engine.model.named_modules()
        if isinstance(each, norms)
        for name in each._buffers
    }
    whole = {
        name for name, buffer in engine.model.named_buffers() if engine.shards.buffer_shapes.get(name) == buffer.shape
    }
    return whole - of_norms


def _record_writes(engine: Engine, batch: Batch) -> PassWrites:
    """Runs forward and backward of `batch` in training mode. Restores the model and returns what the pass has
    written."""
    before = {name: buffer.detach().clone() for name, buffer in engine.model.named_buffers() if not buffer.is_meta}
    once, forward = engine.preflight.once, OncePerStepBuffers(frozenset(before))
    with record_fingerprint(engine), isolated_pass(engine, True, dropout=True, every=True) as writes:
        set_seed(0)
        engine.preflight.once = forward
        try:
            engine.pipeline.run([batch], 1.0)
        finally:
            engine.preflight.once = once
        now = {name: buffer.detach().clone() for name, buffer in engine.model.named_buffers() if not buffer.is_meta}
        written = writes.values()
    moved = {name for name, value in now.items() if name not in before or not _is_identical(value, before[name])}
    backward = frozenset(
        name for name, value in forward.made.items() if name in moved and not _is_identical(value, now[name])
    )
    replaced = restore_replaced_storage(engine)
    return PassWrites(written | replaced, {name: now[name] for name in moved}, backward, frozenset(replaced))


def restore_replaced_storage(engine: Engine) -> dict[str, torch.Tensor]:
    """Finds the parameters to which a pass has assigned a new storage (`weight.data = ...`). The update would change
    only the original storage. Returns the new values by name, and restores the original storage."""
    found = {}
    for unit in engine.zero.units:
        own = unit.weights.full.untyped_storage()._cdata
        for name, parameter in unit.parameters.items() if unit.weights.shared is None else ():
            # Torch functions are disabled because, at ZeRO 3, sharded parameters refuse access to their storage.
            with torch._C.DisableTorchFunctionSubclass():
                if parameter.untyped_storage()._cdata != own:
                    found[name] = parameter.data.clone()
                    if unit.layout.zero_stage < 3:
                        parameter.data = unit.layout.view(unit.weights.full, name)
    return found


def check_replaced_storage(engine: Engine) -> None:
    """Checks after a step that no parameter has a new storage. Called if `is_single_device_step`, because
    `check_pass_writes` checks nothing in this case.

    Raises:
        PlanRefused: a parameter has a new storage.
    """
    for name in sorted(restore_replaced_storage(engine)):
        raise _replaced_error(engine, name)


def _replaced_error(engine: Engine, name: str) -> PlanRefused:
    return PlanRefused(
        Message(
            "plan {plan}: the model replaces the tensor of its parameter {name} in a pass (.data = ...), and the "
            "optimizer would not update the new tensor: write its values in place (.data.copy_(...)), or use "
            "torch.nn.utils.parametrize",
            plan=engine.mesh.plan.name,
            name=name,
        )
    )


def _is_identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _write_report(own: PassWrites, other: PassWrites, name: str, is_parameter: bool) -> WriteReport:
    one, two = (each.parameters.get(name) if is_parameter else each.buffers.get(name) for each in (own, other))
    value: Any = one if one is not None else two
    similarity = one is not None and two is not None and _is_identical(one, two)
    return WriteReport(
        is_parameter,
        random_projection(name, value.double() if not value.is_complex() else value).tolist(),
        similarity,
        WRITE_TOLERANCE.get(value.dtype, 2e-2),
        name in own.backward,
        name in own.replaced,
    )


def _is_close(one: WriteReport, other: WriteReport) -> bool:
    return all(
        abs(a - b) <= one.near * max(abs(a), abs(b)) for a, b in zip(one.projected, other.projected, strict=True)
    )
