"""Interleaved 1F1B: a rank holds v stages a pipeline's length apart (stage s on rank s % p), and micro-batches go
through them p at a time.

Idle share (p - 1) / (v m + p - 1) with equal stages; rank r holds (2 (p - r - 1) + (v - 1) p + 1) / v micro-batches of
its whole share
(at most m). Micro-batches must be a multiple of p.
Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2.2, and its
forward_backward_pipelining_with_interleaving.

>>> " ".join(map(str, order(rank=1, pp=2, virtual_stages=2, micro_batches=2)))
'1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
"""

from __future__ import annotations

from meshwright.core.errors import InputError
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.one_f_one_b import alternate_actions


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    if micro_batches % pp:
        below = micro_batches // pp * pp
        nearest = f"{below} and {below + pp}" if below else str(pp)
        raise InputError(
            f"schedule interleaved needs micro-batches in multiples of pp({pp}), the batch gives {micro_batches}; "
            f"the nearest choices are {nearest}, or schedule 1f1b"
        )
    passes = [
        (turn, first + micro_batch)
        for first in range(0, micro_batches, pp)
        for turn in range(virtual_stages)
        for micro_batch in range(pp)
    ]
    forwards = [Action(ActionKind.F, turn * pp + rank, micro_batch) for turn, micro_batch in passes]
    backwards = [
        Action(ActionKind.B, (virtual_stages - 1 - turn) * pp + rank, micro_batch) for turn, micro_batch in passes
    ]
    return alternate_actions(forwards, backwards, warmup=2 * (pp - 1 - rank) + (virtual_stages - 1) * pp)
