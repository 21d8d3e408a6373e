"""1F1B: as many forwards as there are later ranks, then one forward and one backward in turn, then the remaining
backwards.

Idle share (p - 1) / (m + p - 1) with equal stages, as GPipe; rank r holds only min(m, p - r) micro-batches.
Source: Narayanan et al., PipeDream, SOSP 2019; its flushing form in Megatron-LM, arXiv 2104.04473, section 2.2.1.

>>> " ".join(map(str, order(rank=0, pp=2, virtual_stages=1, micro_batches=3)))
'0F0 0F1 0B0 0F2 0B1 0B2'
"""

from __future__ import annotations

from meshwright.spec.schedules.action import Action, ActionKind


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    forwards = [Action(ActionKind.F, rank, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Action(ActionKind.B, rank, micro_batch) for micro_batch in range(micro_batches)]
    return alternate_actions(forwards, backwards, warmup=pp - 1 - rank)


def alternate_actions(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one of each in turn until the forwards end, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]
