"""Choices that are worth offering for a job, and integer splits: devices into degrees, blocks into stages."""

from __future__ import annotations

from math import ceil

from meshwright.spec.enums import Recompute
from meshwright.spec.job import Job
from meshwright.spec.precision import recipe


def split_with_lighter_last_stage(blocks: int, stages: int, less: int) -> tuple[int, ...]:
    """Returns the blocks of each stage when the last has `less` than an even share. Remaining blocks go to the later
    of the other stages.

    >>> split_with_lighter_last_stage(32, 4, 1), split_with_lighter_last_stage(4, 4, 1)
    ((8, 8, 9, 7), ())
    """
    last = blocks // stages - less
    if last < 1:
        return ()
    return (*reversed(even_split(blocks - last, stages - 1)), last)


def divisors(number: int) -> list[int]:
    """
    >>> divisors(42)
    [1, 2, 3, 6, 7, 14, 21, 42]
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Returns the blocks of each stage as `Plan.stage_layers` distributes them."""
    each, rest = divmod(blocks, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


MAX_FEWER_LAST_BLOCKS = 4
"""Blocks that the last stage of a pipeline may have less than the others at most: what the head weighs in blocks,
rounded up."""

MIN_ATTENTION_CORE_FRACTION = 0.01
"""Of what a block keeps for backward, the share that its attention core must have for selective recompute to be
offered: fused attention
keeps next to nothing there, and a plan that repeats it for that is never the better one."""


def attention_core_fraction(job: Job) -> float:
    """Returns the fraction of the blocks' saved activations that belongs to the attention core."""
    size, sequence = recipe(job.workload.precision).size, job.workload.sequence
    blocks = [layer for layer in job.model.layers if layer.name == "block"]
    core = sum(layer.repeat * (layer.core_fixed + layer.core_context * sequence) for layer in blocks)
    plain = sum(
        layer.repeat * ((layer.saved_split + layer.saved_whole) * size + layer.fixed_split + layer.fixed_whole)
        for layer in blocks
    )
    context = sum(layer.repeat * layer.core_context * sequence for layer in blocks)
    return core / (plain + context) if core else 0.0


MIN_RECOMPUTABLE_FRACTION = 0.1
"""The same for recompute by operation and what follows from the rest."""


def recomputable_fraction(job: Job) -> float:
    """Returns the fraction of the blocks' saved activations that cheap operations can recompute.

    For compiled blocks only activations count that compilation does not drop.
    """
    size = recipe(job.workload.precision).size
    blocks = [layer for layer in job.model.layers if layer.name == "block"]
    derived = sum(
        layer.repeat
        * ((layer.derived_split + layer.derived_whole) * size + layer.derived_fixed_split + layer.derived_fixed_whole)
        for layer in blocks
    )
    saved = sum(
        layer.repeat * ((layer.saved_split + layer.saved_whole) * size + layer.fixed_split + layer.fixed_whole)
        for layer in blocks
    )
    if job.pins.get("compile"):
        fused = sum(
            layer.repeat
            * ((layer.fused_split + layer.fused_whole) * size + layer.fused_fixed_split + layer.fused_fixed_whole)
            for layer in blocks
        )
        derived, saved = derived - fused, saved - fused
    return derived / saved if saved else 0.0


def offered_recompute(job: Job, pinned: Recompute | None = None) -> list[Recompute]:
    """Returns the recompute kinds that blocks may use, from none to full. A `pinned` kind is always offered."""
    selective = attention_core_fraction(job) >= MIN_ATTENTION_CORE_FRACTION or pinned == Recompute.attn
    follows = recomputable_fraction(job) >= MIN_RECOMPUTABLE_FRACTION or pinned == Recompute.sac
    return [Recompute.none, *[Recompute.attn] * selective, *[Recompute.sac] * follows, Recompute.full]


def max_fewer_last_blocks(job: Job) -> int:
    """Returns by how many blocks the last stage may be lighter."""
    work = {layer.name: layer.flops + layer.attention_flops * job.workload.sequence for layer in job.model.layers}
    return min(ceil(work.get("head", 0.0) / work["block"]), MAX_FEWER_LAST_BLOCKS) if work.get("block") else 0
