"""GPipe: every forward, then every backward.

Idle share (p - 1) / (m + p - 1) with equal stages; every rank holds all m micro-batches at its peak.
Backwards run in the order of the forwards (the paper runs them in reverse, at the same cost), so that gradients are
summed in the same
order as under 1F1B and both give the same bits.
Source: Huang et al., GPipe, arXiv 1811.06965, section 2.3.

>>> " ".join(map(str, order(rank=1, pp=2, virtual_stages=1, micro_batches=2)))
'1F0 1F1 1B0 1B1'
"""

from __future__ import annotations

from meshwright.spec.schedules.action import Action, ActionKind


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    return [
        Action(kind, rank, micro_batch) for kind in (ActionKind.F, ActionKind.B) for micro_batch in range(micro_batches)
    ]
