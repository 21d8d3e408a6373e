"""Batch norm: statistics over the samples that pass together make the loss depend on how a batch is divided. An instance norm that keeps running
statistics trains alike, but what it keeps, which evaluation reads, is a mean over the samples that pass together, once a pass.

Rule: one device passes the whole batch at once. A plan passes dp x micro-batches pieces, each with statistics of its own: another mathematics, which
no sum of gradients mends. Tensor ranks divide channels, whose statistics are their own, and stay exact.
"""

from __future__ import annotations

from meshwright.base.errors import InputError
from meshwright.spec.plan import Plan


def check_passes(path: str, plan: Plan, passes: int) -> None:
    """Raises InputError when the statistics of the module at `path` would be over a part of the batch."""
    if path and plan.dp * passes > 1:
        raise InputError(
            f"plan {plan.name}: {path} is a norm with statistics of the batch, and {plan.dp} x {passes} parts of the batch have other statistics than the whole: "
            f"use dp1 with the batch as one micro-batch (tp stays exact), a norm without them (GroupNorm), or put it in eval mode, where its statistics are fixed"
        )
