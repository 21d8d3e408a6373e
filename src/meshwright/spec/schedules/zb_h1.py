"""ZB-H1: 1F1B whose backward is two actions. The gradient of the input goes on at once; that of the weights fills what
would be idle time.

Idle time of a rank (p - 1) (F + B - W), where B and W are the two halves of the backward: a third of 1F1B's (p - 1) (F
+ B + W) when all
three take the same. Rank r puts W off by r micro-batches, so that every rank holds min(m, p) micro-batches, no more
than 1F1B's first.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2 and figure 3.

>>> " ".join(map(str, order(rank=1, pp=2, virtual_stages=1, micro_batches=3)))
'1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2'
"""

from __future__ import annotations

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.one_f_one_b import order as one_f_one_b


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    line: list[Action] = []
    for action in one_f_one_b(rank, pp, virtual_stages, micro_batches):
        line.append(action)
        if action.kind is ActionKind.B and action.micro_batch >= rank:
            line.append(Action(ActionKind.W, rank, action.micro_batch - rank))
    return line + [Action(ActionKind.W, rank, late) for late in range(max(micro_batches - rank, 0), micro_batches)]
