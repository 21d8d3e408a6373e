"""What the parts of a plan can be: orders of pipelines, what recomputes, what waits on the host, how context ranks
attend, orders of axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from meshwright.spec.schedules.schedule_registry import schedule_names


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
    """Activation checkpointing: what backward computes again instead of keeping. Selective: the attention core (arXiv
    2205.05198, section 5).
    Operations: all but matrix products and attention, where less is held for it (analysis/remat/tape.py). Layer: whole
    blocks."""

    none = "none"
    attn = "attn"
    sac = "sac"
    full = "full"


PER_BLOCK_RECOMPUTE = (Recompute.sac, Recompute.full)
"""What some of the blocks of a stage can do beside others that do less."""


class Offload(StrEnum):
    """What waits in host memory, or in files of a disk."""

    optimizer = "optimizer"
    optimizer_disk = "optimizer-disk"
    gradients = "gradients"
    parameters = "parameters"
    parameters_disk = "parameters-disk"
    activations = "activations"
    activations_disk = "activations-disk"


DISK_OFFLOADS = (Offload.optimizer_disk, Offload.parameters_disk, Offload.activations_disk)
"""What waits in files; all else waits in host memory."""

OPTIMIZER_OFFLOADS = (Offload.optimizer, Offload.optimizer_disk)
"""The optimizer's states, with the float32 weights that they belong to."""

PARAMETER_OFFLOADS = (Offload.parameters, Offload.parameters_disk)
"""ZeRO 3's shards of the weights."""

ACTIVATION_OFFLOADS = (Offload.activations, Offload.activations_disk)
"""What blocks keep between their forward and their backward."""

EXCLUSIVE_OFFLOADS = {
    "optimizer": OPTIMIZER_OFFLOADS,
    "parameters": PARAMETER_OFFLOADS,
    "activations": ACTIVATION_OFFLOADS,
}
"""What waits in one place only: on the host, or in files."""

OFFLOAD_AMOUNT_FIELDS = {
    **dict.fromkeys(OPTIMIZER_OFFLOADS, "offload_share"),
    **dict.fromkeys(PARAMETER_OFFLOADS, "weights_share"),
    **dict.fromkeys(ACTIVATION_OFFLOADS, "offload_layers"),
}
"""What a number behind a name says, as the field of a plan: the share of each rank's that waits, or of how many
blocks."""


def offloads_states(offload: Collection[Offload]) -> bool:
    """Whether the optimizer's states wait so."""
    return bool(set(offload) & set(OPTIMIZER_OFFLOADS))


def offloads_weights(offload: Collection[Offload]) -> bool:
    """Whether weights wait so."""
    return bool(set(offload) & set(PARAMETER_OFFLOADS))


def offloads_activations(offload: Collection[Offload]) -> bool:
    """Whether activations wait so."""
    return bool(set(offload) & set(ACTIVATION_OFFLOADS))


def min_zero_stage(offload: Collection[Offload]) -> int:
    """The least ZeRO stage at which ranks have what waits so: weights wait as the shards of ZeRO 3, sums of gradients
    as those of ZeRO 2."""
    return 3 if offloads_weights(offload) else 2 if Offload.gradients in offload else 0


def upgrade_offload_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a plan, or pins, of an earlier version as this version writes them.

    `offload_share` was the percentage of the weights where only weights were offloaded.

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
    """How the ranks that share a sequence attend over all of it."""

    ring = "ring"
    """Keys and values go round (Liu et al., Ring Attention, arXiv 2310.01889)."""
    ulysses = "ulysses"
    """Heads are exchanged for positions and back (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509)."""


MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "tp")
"""Outermost first; dp is dp_replicate x dp_shard x cp."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
