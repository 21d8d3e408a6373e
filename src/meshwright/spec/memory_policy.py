"""Determines what a plan recomputes and offloads in each block of a virtual stage.

A block is identified by its index in its virtual stage: [Note: first blocks] in plan.py.
"""

from __future__ import annotations

from meshwright.spec.enums import OFFLOAD_AMOUNT_FIELDS, PER_BLOCK_RECOMPUTE, Offload, Recompute, offloads_activations
from meshwright.spec.plan import Plan


def offload_percent(plan: Plan, what: Offload) -> int:
    """Returns the percentage of `what` that is offloaded.

    >>> from meshwright.spec.plan import parse_plan
    >>> plan = parse_plan("dp2.z3.off-optimizer60.off-parameters-disk50.off-activations8")
    >>> [offload_percent(plan, what) for what in plan.offload]
    [60, 50, 100]
    """
    field = OFFLOAD_AMOUNT_FIELDS.get(what, "")
    return int(getattr(plan, field)) if field.endswith("_share") else 100


def recompute_at(plan: Plan, index: int) -> Recompute:
    """Returns the kind of recompute of the block at `index` of its virtual stage."""
    return plan.recompute if not plan.recompute_layers or index < plan.recompute_layers else plan.recompute_rest


def offloads_block(plan: Plan, index: int) -> bool:
    """Returns whether the activations of the block at `index` of its virtual stage are offloaded."""
    return offloads_activations(plan.offload) and (not plan.offload_layers or index < plan.offload_layers)


def defers_wgrad(plan: Plan, index: int) -> bool:
    """Returns whether the block at `index` computes its weight gradients in W, if its stage has W.

    A block with recompute or offload computes its weight gradients in B. Otherwise its recomputed or fetched
    activations would be stored until W.
    """
    return recompute_at(plan, index) not in PER_BLOCK_RECOMPUTE and not offloads_block(plan, index)
