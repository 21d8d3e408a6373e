"""Interleaved 1F1B: each of p ranks has v stages at distance p (stage s is on rank s % p). The m micro-batches run in
rounds of p.

With equal stages the bubble is the fraction (p - 1) / (v * m + p - 1) of the step. Rank r has at most (2 (p - r - 1) +
(v - 1) p + 1) / v micro-batches of all its stages in flight, and never more than m. The number of micro-batches m is a
multiple of p.

Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2.2, and its
forward_backward_pipelining_with_interleaving.

>>> " ".join(map(str, Interleaved().order(rank=1, pp=2, virtual_stages=2, micro_batches=2)))
'1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.one_f_one_b import alternate_actions
from meshwright.spec.schedules.schedule import InFlight, Schedule


class Interleaved(Schedule):
    """Interleaved 1F1B, with two or more stages on each rank."""

    name = "interleaved"
    preference = 2
    stages_per_rank = 2
    any_stages_per_rank = True
    in_rounds = True

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank.

        Raises: InputError if `micro_batches` is not a multiple of `pp`.
        """
        if micro_batches % pp:
            below = micro_batches // pp * pp
            nearest = f"{below} and {below + pp}" if below else str(pp)
            raise InputError(
                Message(
                    "schedule interleaved needs micro-batches in multiples of pp({pp}), the batch gives "
                    "{micro_batches}; the nearest choices are {nearest}, or schedule 1f1b",
                    pp=pp,
                    micro_batches=micro_batches,
                    nearest=nearest,
                )
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

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[InFlight]:
        """Returns one possible memory peak for m = p. For larger m it returns v possible peaks, one before the p
        backwards of each stage.

        [Note: moments] A rank runs p backwards of its last stage, then p backwards of the stage before it, and so on.
        During p backwards of one stage, the number of micro-batches in flight changes linearly. Only the stage whose
        backwards come next gains micro-batches. So memory can have its peak only before the first of p backwards. This
        is one point for m = p, otherwise v points, equal in every round. After k * p backwards of rank r, min(m * v, 2
        (p - r - 1) + (v - 1) p + k * p + 1) forwards have run.

        >>> [moment.alive for moment in Interleaved().in_flight(rank=0, pp=2, virtual_stages=2, micro_batches=4)]
        [(3, 2), (4, 1)]
        """
        one_round = micro_batches <= pp
        moments = []
        for phase in range(1 if one_round else virtual_stages):
            forwards = 2 * (pp - rank - 1) + (virtual_stages - 1 + phase) * pp + 1
            rounds, rest = divmod(min(forwards, pp * virtual_stages) if one_round else forwards, pp * virtual_stages)
            full, part = divmod(rest, pp)
            alive = [(rounds + 1) * pp] * full
            if full < virtual_stages:
                alive += [rounds * pp + part] + [rounds * pp] * (virtual_stages - full - 1)
            freed = virtual_stages - phase
            moments.append(InFlight(freed - 1, (*alive[:freed], *(count - pp for count in alive[freed:]))))
        return moments

    def name_part(self, virtual_stages: int) -> str:
        """Returns the name of the schedule, followed by the number of virtual stages."""
        return f"{self.name}{virtual_stages}"

    def parse_name_part(self, part: str) -> dict[str, Any] | None:
        """Returns the name of the schedule and the number of virtual stages, which follows the name in `part`. Returns
        None for any other part."""
        match = re.fullmatch(rf"{self.name}(\d+)", part)
        return {"schedule": self.name, "virtual_stages": int(match[1])} if match else None
