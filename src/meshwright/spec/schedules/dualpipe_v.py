"""DualPipe-V: two stages on each rank as a V, as in ZB-V. In the steady state a forward of one stage is paired with a
backward of the other stage. A runtime can then overlap the communication of one action with the computation of the
other.

W follows B directly, except among the last backwards of a rank, where W fills idle time. Let p be the number of ranks.
In the published schedule a rank idles for at most (p - 1) (F&B + B - 3 W). F&B is the time of a paired forward and
backward, B that of a whole backward, and W that of the weight gradients. Here a rank idles less, because the gradient
of the input is sent before the gradients of the weights are computed. The idle time is (p - 1) f if forward and both
halves of backward each take f seconds on a stage. Every rank has (2 p + 1) / 2 micro-batches of both stages in flight.
The number of micro-batches m is at least 2 p.

Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1; deepseek-ai/DualPipe, dualpipev.py.

>>> " ".join(map(str, DualPipeV().order(rank=0, pp=1, virtual_stages=2, micro_batches=2)))
'0F0 1F0 0F1 1B0 1W0 1F1 0B0 0W0 1B1 1W1 0B1 0W1'
"""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.schedule import InFlight, Schedule, elementwise_max, elementwise_min
from meshwright.spec.schedules.zb_v import ActionWriter


class DualPipeV(Schedule):
    """DualPipe-V: two stages on each rank, as a V, with each forward paired with a backward."""

    name = "dualpipev"
    preference = 5
    stages_per_rank = 2
    splits_backward = True

    @property
    def v_shape(self) -> bool:
        """Returns True: the stages form a V."""
        return True

    def min_micro_batches(self, pp: int) -> int:
        """Returns twice the number of pipeline ranks."""
        return 2 * pp

    def order(self, rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
        """Returns the actions of one pipeline rank.

        Raises: InputError for fewer than 2 p micro-batches.
        """
        if micro_batches < 2 * pp:
            raise InputError(
                Message(
                    "schedule dualpipev needs at least 2 * pp({pp}) = {least} micro-batches, the batch gives "
                    "{micro_batches}; use schedule zbv",
                    pp=pp,
                    least=2 * pp,
                    micro_batches=micro_batches,
                )
            )
        F, B, W = ActionKind
        writer, later_ranks = ActionWriter(rank, pp), pp - rank - 1
        for _ in range(2 * later_ranks):
            writer.write((F, 0))
        for _ in range(rank + 1):
            writer.write((F, 0), (F, 1))
        for _ in range(later_ranks):
            writer.write((B, 1), (W, 1), (F, 1))
        for _ in range(micro_batches - 2 * pp + rank + 1):
            writer.write((F, 0), (B, 1), (W, 1), (F, 1), (B, 0), (W, 0))
        for _ in range(later_ranks):
            writer.write((B, 1), (W, 1), (F, 1), (B, 0), (W, 0))
        deferred = _drain_backwards(writer, rank)
        for _ in range(later_ranks):
            if deferred:
                writer.write((W, deferred.pop(0)))
            writer.write((B, 0))
            deferred.append(0)
        for side in deferred:
            writer.write((W, side))
        return writer.actions

    def bubble(self, f: Any, b: Any, w: Any, virtual_stages: Any) -> Any:
        """Returns max(f + b - w, f, b) / 2, where f, b and w are the seconds of F, B and W on both stages of a rank."""
        return elementwise_max(elementwise_max(f + b - w, f), b) / 2

    def drain_bubble(self, f: Any, b: Any, w: Any) -> tuple[Any, Any] | None:
        """Returns the lower bound from the last backwards of a step. Each rank except the slowest adds b - w / 2, and
        the slowest rank adds -f / 2. The symbols f, b and w are the seconds of F, B and W on both stages of a rank."""
        return b - w / 2, -f / 2

    def in_flight(self, rank: int, pp: int, virtual_stages: int, micro_batches: Any) -> list[InFlight]:
        """Returns the micro-batches in flight before a backward of either stage. On rank r of p ranks these are 2 p - r
        on the first stage and r + 1 on the second, but at most all micro-batches of the step."""
        alive = (elementwise_min(micro_batches, 2 * pp - rank), elementwise_min(micro_batches, rank + 1))
        return [InFlight(0, alive), InFlight(1, alive)]

    def messages(self, pp: int, virtual_stages: int, micro_batches: Any) -> Any:
        """Returns 4 (p - 1) for p ranks, an upper bound."""
        return 4 * (pp - 1)


def _drain_backwards(writer: ActionWriter, rank: int) -> list[int]:
    """Writes the last backwards of both stages. The first of these are whole backwards. The later ones are only B, and
    their W is deferred.

    Returns the side (0 or 1, the first or second stage) of each deferred W, in order.
    """
    sides = [side for _ in range(rank + 1) for side in (1, 0)]
    whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for side in sides[:whole]:
        writer.write((ActionKind.B, side), (ActionKind.W, side))
    for side in sides[whole:]:
        writer.write((ActionKind.B, side))
    return sides[whole:]
