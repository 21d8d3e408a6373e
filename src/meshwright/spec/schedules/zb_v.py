"""ZB-V: two stages on each rank in the shape of a V. Rank r of p ranks has the stages r and 2 p - 1 - r.

The stages p - 1 and p are both on the last rank, so that no message is needed between them. Backward ends on the rank
where forward began. A rank idles for (p - 1) f if forward and both halves of backward each take f seconds on a stage.
This is half of the idle time of ZB-H1, and a sixth of the idle time of 1F1B. With m micro-batches, every rank has
min(m, p) micro-batches of both stages in flight.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6.

>>> " ".join(map(str, ZBV().order(rank=0, pp=2, virtual_stages=2, micro_batches=2)))
'0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1'
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.schedule import InFlight, Schedule, elementwise_max, elementwise_min


class ActionWriter:
    """Writes the actions of a rank with two stages. `done` counts the written actions of each kind on the first stage
    (side 0) and on the second stage (side 1)."""

    def __init__(self, rank: int, pp: int) -> None:
        self.stages = (rank, 2 * pp - 1 - rank)
        self.done = {(kind, side): 0 for kind in ActionKind for side in (0, 1)}
        self.actions: list[Action] = []

    def write(self, *steps: tuple[ActionKind, int]) -> None:
        """Appends, for each kind and side in `steps`, the action of the next micro-batch."""
        for kind, side in steps:
            self.actions.append(Action(kind, self.stages[side], self.done[kind, side]))
            self.done[kind, side] += 1

    def write_deferred(self, side: int) -> None:
        """Appends the deferred weight gradients of `side`."""
        while self.done[ActionKind.W, side] < self.done[ActionKind.B, side]:
            self.write((ActionKind.W, side))


class ZBV(Schedule):
    """ZB-V: two stages on each rank, as a V, with split backwards."""

    name = "zbv"
    preference = 4
    stages_per_rank = 2
    splits_backward = True

    @property
    def v_shape(self) -> bool:
        """Returns True: the stages form a V."""
        return True

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank."""
        F, B, W = ActionKind
        count = max(2 * pp - 1, micro_batches)
        writer = ActionWriter(rank, pp)
        for _ in range(2 * (pp - rank) - 1):
            writer.write((F, 0))
        for _ in range(rank):
            writer.write((F, 1), (F, 0))
        for _ in range(pp - rank):
            writer.write((F, 1), (B, 1), (W, 1))
        while writer.done[F, 1] < writer.done[F, 0] or writer.done[F, 0] < count:
            if writer.done[F, 0] < count:
                writer.write((F, 0))
            writer.write((B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
        for _ in range(rank):
            writer.write((B, 0), (B, 1))
        for _ in range(pp - rank):
            writer.write((B, 0), (W, 0))
        writer.write_deferred(1)
        writer.write_deferred(0)
        return [action for action in writer.actions if action.micro_batch < micro_batches]

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns max(f / 2, b / 2, b - w), where f, b and w are the seconds of F, B and W on both stages of a rank."""
        return elementwise_max(elementwise_max(f, b) / 2, b - w)

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the micro-batches in flight on both stages of rank r at two points of a step.

        Before a backward of the first stage they are min(m, 2 p - r) and min(max(m - p + r, 0), r). Before a backward
        of the second stage they are min(m, 2 p - 1 - r) and min(m, r + 1).
        """
        second = elementwise_min(elementwise_max(micro_batches - pp + rank, 0), rank)
        return [
            InFlight(0, (elementwise_min(micro_batches, 2 * pp - rank), second)),
            InFlight(1, (elementwise_min(micro_batches, 2 * pp - 1 - rank), elementwise_min(micro_batches, rank + 1))),
        ]

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 4 (p - 1) + max(p - 3, 0) for p ranks, an upper bound."""
        return 4 * (pp - 1) + max(pp - 3, 0)
