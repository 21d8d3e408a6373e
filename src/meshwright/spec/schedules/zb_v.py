"""ZB-V: two stages a rank, laid as a V: stage s on rank s on the way down, stage 2p - 1 - s on the way back up. The
last two stages are on one
rank, so that a micro-batch turns round without waiting, and backward ends on the rank where forward began.

Idle time of a rank (p - 1) f where forward and both halves of backward take the same f on a stage: half of ZB-H1's, a
sixth of 1F1B's. Every
rank holds min(m, p) micro-batches of its whole share.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6.

>>> " ".join(map(str, order(rank=0, pp=2, virtual_stages=2, micro_batches=2)))
'0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1'
"""

from __future__ import annotations

from meshwright.spec.schedules.action import Action, ActionKind


class ActionWriter:
    """Writes a rank's actions: how many of each kind have been done on its `down` stage (0) and its `up` stage (1)."""

    def __init__(self, rank: int, pp: int) -> None:
        self.stages = (rank, 2 * pp - 1 - rank)
        self.done = {(kind, side): 0 for kind in ActionKind for side in (0, 1)}
        self.line: list[Action] = []

    def do(self, *what: tuple[ActionKind, int]) -> None:
        """The next micro-batch of each kind on each side."""
        for kind, side in what:
            self.line.append(Action(kind, self.stages[side], self.done[kind, side]))
            self.done[kind, side] += 1

    def catch_up(self, side: int) -> None:
        """The gradients of weights that have been put off."""
        while self.done[ActionKind.W, side] < self.done[ActionKind.B, side]:
            self.do((ActionKind.W, side))


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    F, B, W = ActionKind
    count = max(2 * pp - 1, micro_batches)
    turns = ActionWriter(rank, pp)
    for _ in range(2 * (pp - rank) - 1):
        turns.do((F, 0))
    for _ in range(rank):
        turns.do((F, 1), (F, 0))
    for _ in range(pp - rank):
        turns.do((F, 1), (B, 1), (W, 1))
    while turns.done[F, 1] < turns.done[F, 0] or turns.done[F, 0] < count:
        if turns.done[F, 0] < count:
            turns.do((F, 0))
        turns.do((B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    for _ in range(rank):
        turns.do((B, 0), (B, 1))
    for _ in range(pp - rank):
        turns.do((B, 0), (W, 0))
    turns.catch_up(1)
    turns.catch_up(0)
    return [action for action in turns.line if action.micro_batch < micro_batches]
