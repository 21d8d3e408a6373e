"""1F1B: first as many forwards as there are later ranks, then alternately one forward and one backward, then the
remaining backwards.

With p ranks, m micro-batches and equal stages, the bubble is the fraction (p - 1) / (m + p - 1) of the step, as with
GPipe. Rank r has only min(m, p - r) micro-batches in flight.

Source: Narayanan et al., PipeDream, SOSP 2019; its flushing form in Megatron-LM, arXiv 2104.04473, section 2.2.1.

>>> " ".join(map(str, OneFOneB().order(rank=0, pp=2, virtual_stages=1, micro_batches=3)))
'0F0 0F1 0B0 0F2 0B1 0B2'
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.schedule import InFlight, Schedule, elementwise_max, elementwise_min


class OneFOneB(Schedule):
    """1F1B: the simplest schedule, and the default of a plan."""

    name = "1f1b"
    preference = 0
    heterogeneous = True

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank."""
        forwards = [Action(ActionKind.F, rank, micro_batch) for micro_batch in range(micro_batches)]
        backwards = [Action(ActionKind.B, rank, micro_batch) for micro_batch in range(micro_batches)]
        return alternate_actions(forwards, backwards, warmup=pp - 1 - rank)

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the memory peak before a backward of the steady state, with min(m, p - r) micro-batches in flight."""
        return [InFlight(0, (elementwise_min(micro_batches, pp - rank),))]

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 2 (p - 1) + 2 (n - floor(n / p)) messages for p ranks and m micro-batches, with n = max(m - 2, 0).

        The messages of the steady state count too. At most p micro-batches are in flight, so each of them waits for its
        messages.
        """
        if pp == 1:
            return 0
        later = elementwise_max(micro_batches - 2, 0)
        return 2 * (pp - 1) + 2 * (later - later // pp)


def alternate_actions(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Returns `warmup` forwards, then forwards and backwards alternately until the forwards end, then the remaining
    backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]
