"""Defines the values of a plan's fields: schedules, recompute, offload, context parallelism, and the order of mesh
axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from meshwright.spec.schedules.schedule import schedule_names


def _check_schedule_name(name: str) -> str:
    if name not in schedule_names():
        *first, last = map(repr, schedule_names())
        raise PydanticCustomError("enum", "Input should be {expected}", {"expected": f"{', '.join(first)} or {last}"})
    return name


ScheduleName = Annotated[
    str, AfterValidator(_check_schedule_name), WithJsonSchema({"enum": list(schedule_names()), "type": "string"})
]
"""The name of a pipeline schedule; `spec/schedules` has one file for each."""

DEFAULT_SCHEDULE = schedule_names()[0]
"""The simplest schedule, which takes any number of micro-batches."""


class Recompute(StrEnum):
    """Activation checkpointing: the operations that backward recomputes.

    attn: the attention core (arXiv 2205.05198, section 5). sac: all operations except matrix products and attention,
    where this saves memory (analysis/recompute_tape.py). full: whole blocks.
    """

    none = "none"
    attn = "attn"
    sac = "sac"
    full = "full"


PER_BLOCK_RECOMPUTE = (Recompute.sac, Recompute.full)
"""The kinds of recompute that a plan may limit to the first blocks of a stage."""


class Offload(StrEnum):
    """The kinds of tensors that are offloaded, to CPU memory or (disk) to files on a disk."""

    optimizer = "optimizer"
    optimizer_disk = "optimizer-disk"
    gradients = "gradients"
    parameters = "parameters"
    parameters_disk = "parameters-disk"
    activations = "activations"
    activations_disk = "activations-disk"


DISK_OFFLOADS = (Offload.optimizer_disk, Offload.parameters_disk, Offload.activations_disk)
"""Offloads to files on a disk. All other offloads go to CPU memory."""

OPTIMIZER_OFFLOADS = (Offload.optimizer, Offload.optimizer_disk)
"""Offload of the optimizer states, together with the float32 main weights."""

PARAMETER_OFFLOADS = (Offload.parameters, Offload.parameters_disk)
"""Offload of the ZeRO-3 shards of the weights."""

ACTIVATION_OFFLOADS = (Offload.activations, Offload.activations_disk)
"""Offload of the activations that blocks save for backward."""

EXCLUSIVE_OFFLOADS = {
    "optimizer": OPTIMIZER_OFFLOADS,
    "parameters": PARAMETER_OFFLOADS,
    "activations": ACTIVATION_OFFLOADS,
}
"""The kinds of tensors that a plan offloads either to CPU memory or to files, not to both."""

OFFLOAD_AMOUNT_FIELDS = {
    **dict.fromkeys(OPTIMIZER_OFFLOADS, "offload_share"),
    **dict.fromkeys(PARAMETER_OFFLOADS, "weights_share"),
    **dict.fromkeys(ACTIVATION_OFFLOADS, "offload_layers"),
}
"""For each offload, the field of a plan that limits it. In a plan's name, the value of this field follows the offload:
the offloaded percentage, or the number of blocks."""


def offloads_states(offload: Collection[Offload]) -> bool:
    """Returns whether optimizer states are offloaded."""
    return bool(set(offload) & set(OPTIMIZER_OFFLOADS))


def offloads_weights(offload: Collection[Offload]) -> bool:
    """Returns whether weights are offloaded."""
    return bool(set(offload) & set(PARAMETER_OFFLOADS))


def offloads_activations(offload: Collection[Offload]) -> bool:
    """Returns whether activations are offloaded."""
    return bool(set(offload) & set(ACTIVATION_OFFLOADS))


def min_zero_stage(offload: Collection[Offload]) -> int:
    """Returns the lowest ZeRO stage that `offload` needs: ZeRO 3 to offload weights, ZeRO 2 to offload gradients."""
    return 3 if offloads_weights(offload) else 2 if Offload.gradients in offload else 0


def upgrade_offload_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the fields of a plan, or of pins (the plan fields that the user fixes), from an earlier version to this
    version.

    In earlier versions, if only weights were offloaded, `offload_share` was the percentage of the weights to offload.
    This is now `weights_share`.

    >>> upgrade_offload_fields({"offload": ["parameters"], "offload_share": 50})
    {'offload': ['parameters'], 'weights_share': 50}
    """
    listed = given.get("offload", ())
    offload: list[Any] = [what for what in listed if isinstance(what, str)] if isinstance(listed, list | tuple) else []
    weights_only = offloads_weights(offload) and not offloads_states(offload)
    if not weights_only or given.get("offload_share", 100) == 100 or given.get("weights_share", 100) != 100:
        return dict(given)
    return {
        **{name: value for name, value in given.items() if name != "offload_share"},
        "weights_share": given["offload_share"],
    }


MeshAxis = Literal["pp", "dp", "tp"]


class ContextParallelMethod(StrEnum):
    """The method by which context-parallel ranks compute attention over the whole sequence."""

    ring = "ring"
    """Keys and values are passed around a ring of ranks (Liu et al., Ring Attention, arXiv 2310.01889)."""
    ulysses = "ulysses"
    """An all-to-all exchanges heads for sequence positions, and a second one reverts it (Jacobs et al., DeepSpeed
    Ulysses, arXiv 2309.14509)."""


MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "tp")
"""The order of mesh axes from outermost to innermost. The axis dp is dp_replicate x dp_shard x cp."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
