"""Selects the choices that are worth searching for a job. It also splits integers: devices into degrees, and blocks
into stages."""

from __future__ import annotations

from math import ceil

from meshwright.spec.enums import Recompute
from meshwright.spec.job import Job
from meshwright.spec.precision import recipe


def split_with_lighter_last_stage(blocks: int, stages: int, less: int) -> tuple[int, ...]:
    """Returns the blocks of each stage if the last stage has `less` blocks fewer than an even split. The remainder goes
    to the last of the other stages. Returns an empty tuple if the last stage would have no block.

    >>> split_with_lighter_last_stage(32, 4, 1), split_with_lighter_last_stage(4, 4, 1)
    ((8, 8, 9, 7), ())
    """
    last = blocks // stages - less
    if last < 1:
        return ()
    return (*reversed(even_split(blocks - last, stages - 1)), last)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number` in ascending order.

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
"""The last stage may have at most this many blocks fewer than the other stages. The searched number is the work of the
head divided by that of a block, rounded up."""

MIN_ATTENTION_CORE_FRACTION = 0.01
"""Recompute of the attention core is searched if at least this fraction of a block's saved activations belongs to the
attention core. Fused attention saves almost nothing there, so recomputing it never helps."""


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
"""Selective recompute is searched if at least this fraction of a block's saved activations is cheap to recompute."""


def recomputable_fraction(job: Job) -> float:
    """Returns the fraction of the blocks' saved activations that cheap operations can recompute.

    For compiled blocks, only the activations that a compiled block saves count.
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
    """Returns the recompute kinds that blocks may use, from none to full. The kind `pinned` is always included."""
    selective = attention_core_fraction(job) >= MIN_ATTENTION_CORE_FRACTION or pinned == Recompute.attn
    follows = recomputable_fraction(job) >= MIN_RECOMPUTABLE_FRACTION or pinned == Recompute.sac
    return [Recompute.none, *[Recompute.attn] * selective, *[Recompute.sac] * follows, Recompute.full]


def max_fewer_last_blocks(job: Job) -> int:
    """Returns the maximum number of blocks by which the last stage may be shorter than all other stages."""
    work = {layer.name: layer.flops + layer.attention_flops * job.workload.sequence for layer in job.model.layers}
    return min(ceil(work.get("head", 0.0) / work["block"]), MAX_FEWER_LAST_BLOCKS) if work.get("block") else 0
