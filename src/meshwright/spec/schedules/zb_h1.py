"""ZB-H1: 1F1B whose backward is two actions. W fills idle time, and the gradient of the input is not delayed.

Let p be the number of ranks, m the number of micro-batches, and f, b and w the seconds of F, B and W. A rank idles for
(p - 1) (f + b - w). If f, b and w are equal, this is a third of the idle time of 1F1B, which is (p - 1) (f + b + w).
Rank r defers W by r micro-batches, so that every rank stores min(m, p) micro-batches. With 1F1B only the first rank
stores that many.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2 and figure 3.

>>> " ".join(map(str, ZBH1().order(rank=1, pp=2, virtual_stages=1, micro_batches=3)))
'1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2'
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.one_f_one_b import OneFOneB
from meshwright.spec.schedules.schedule import InFlight, Schedule, elementwise_max, elementwise_min


class ZBH1(Schedule):
    """ZB-H1: the peak activations of 1F1B with a third of its bubble."""

    name = "zbh1"
    preference = 3
    splits_backward = True
    defers_weights = True

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank."""
        actions: list[Action] = []
        for action in OneFOneB().order(rank, pp, virtual_stages, micro_batches):
            actions.append(action)
            if action.kind is ActionKind.B and action.micro_batch >= rank:
                actions.append(Action(ActionKind.W, rank, action.micro_batch - rank))
        last = range(max(micro_batches - rank, 0), micro_batches)
        return actions + [Action(ActionKind.W, rank, micro_batch) for micro_batch in last]

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns max(f + b - w, f, b), where f, b and w are the seconds of F, B and W."""
        return elementwise_max(elementwise_max(f + b - w, f), b)

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the memory peak of rank r before a B: min(m, p - r) micro-batches whose B has not run. W is deferred
        for further micro-batches, up to min(m, p) in total."""
        before_b = elementwise_min(micro_batches, pp - rank)
        return [InFlight(0, (before_b,), elementwise_min(micro_batches, pp) - before_b)]

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 2 (p - 1) + 2 min(max(m - 2, 0), p - 1) messages for p ranks and m micro-batches."""
        return 2 * (pp - 1) + 2 * elementwise_min(elementwise_max(micro_batches - 2, 0), pp - 1)
