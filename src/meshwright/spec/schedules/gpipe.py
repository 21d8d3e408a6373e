"""GPipe: every forward, then every backward.

With p ranks, m micro-batches and equal stages, the bubble is the fraction (p - 1) / (m + p - 1) of the step. Every rank
has all m micro-batches in flight at its peak. Backwards run in the order of the forwards. The paper runs them in
reverse order, at the same cost. The order used here sums gradients in the order of 1F1B, so that both schedules give
bit-equal results.

Source: Huang et al., GPipe, arXiv 1811.06965, section 2.3.

>>> " ".join(map(str, GPipe().order(rank=1, pp=2, virtual_stages=1, micro_batches=2)))
'1F0 1F1 1B0 1B1'
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.schedule import InFlight, Schedule


class GPipe(Schedule):
    """GPipe: all forwards before all backwards."""

    name = "gpipe"
    preference = 1
    heterogeneous = True

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank."""
        return [
            Action(kind, rank, micro_batch)
            for kind in (ActionKind.F, ActionKind.B)
            for micro_batch in range(micro_batches)
        ]

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the memory peak before the first backward, with all m micro-batches in flight."""
        return [InFlight(0, (micro_batches,))]

    def in_flight_limit(self, pp: int) -> int | None:
        """Returns None, because a rank has all micro-batches in flight."""
        return None
