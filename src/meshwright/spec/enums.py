"""What the parts of a plan can be: orders of pipelines, what recomputes, what waits on the host, how context ranks
attend, orders of axes."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from typing import Literal


class ScheduleName(StrEnum):
    """Pipeline orders; `schedules/` holds one file for each."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zbh1 = "zbh1"
    """ZB-H1: 1F1B with a backward in two actions (arXiv 2401.10241)."""
    zbv = "zbv"
    """ZB-V: the same over two stages a rank, laid as a V."""
    dualpipev = "dualpipev"
    """DualPipe-V (arXiv 2412.19437), laid as a V too."""
    actions = "actions"
    """As the plan itself says, action by action."""


STAGES_PER_RANK = {ScheduleName.zbv: 2, ScheduleName.dualpipev: 2}
"""Stages a rank where they are not one; interleaved and actions have as many as one likes."""


def stage_to_rank(stage: int, pp: int, as_v: bool) -> int:
    """The pipeline rank of a stage: round after round, or down and up again as a V. Arrays of stages give arrays of
    ranks.

    >>> [stage_to_rank(stage, 4, False) for stage in range(8)], [stage_to_rank(stage, 4, True) for stage in range(8)]
    ([0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0])
    """
    return (2 * pp - 1 - abs(2 * stage - 2 * pp + 1)) // 2 if as_v else stage % pp


def is_v_shape(schedule: ScheduleName, actions: tuple[str, ...] = ()) -> bool:
    """Whether the stages of a rank are s and 2 pp - 1 - s instead of s, s + pp, ... Actions say it themselves: the last
    rank runs stage pp."""
    if schedule == ScheduleName.actions:
        return len(actions) > 1 and re.search(rf"(^|\s){len(actions)}[FBW]", actions[-1]) is not None
    return schedule in (ScheduleName.zbv, ScheduleName.dualpipev)


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
