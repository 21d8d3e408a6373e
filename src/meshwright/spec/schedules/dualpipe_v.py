"""DualPipe-V: two stages a rank, laid as a V as in ZB-V; in the steady state a forward of one stage and a backward of
the other always stand together,
so that a runtime can run the exchange of one beside the compute of the other.

Backwards are whole (B, then W at once) but where a rank would wait. Idle time of a rank at most (p - 1) (F&B + B - 3 W)
with the whole backward's B;
less here, where the gradient of the input goes on before that of the weights is made: (p - 1) f where forward and both
halves of backward take
the same f on a stage. Every rank holds (2p + 1) / 2 micro-batches of its whole share. At least 2p micro-batches.
Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1; deepseek-ai/DualPipe, dualpipev.py.

>>> " ".join(map(str, order(rank=0, pp=1, virtual_stages=2, micro_batches=2)))
'0F0 1F0 0F1 1B0 1W0 1F1 0B0 0W0 1B1 1W1 0B1 0W1'
"""

from __future__ import annotations

from meshwright.core.errors import InputError
from meshwright.spec.schedules.action import Action, ActionKind
from meshwright.spec.schedules.zb_v import ActionWriter


def order(rank: int, pp: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    if micro_batches < 2 * pp:
        raise InputError(
            f"schedule dualpipev needs at least 2 * pp({pp}) = {2 * pp} micro-batches, the batch gives {micro_batches}; use schedule zbv"
        )
    F, B, W = ActionKind
    turns, behind = ActionWriter(rank, pp), pp - rank - 1
    for _ in range(2 * behind):
        turns.do((F, 0))
    for _ in range(rank + 1):
        turns.do((F, 0), (F, 1))
    for _ in range(behind):
        turns.do((B, 1), (W, 1), (F, 1))
    for _ in range(micro_batches - 2 * pp + rank + 1):
        turns.do((F, 0), (B, 1), (W, 1), (F, 1), (B, 0), (W, 0))
    for _ in range(behind):
        turns.do((B, 1), (W, 1), (F, 1), (B, 0), (W, 0))
    put_off = _drain_backwards(turns, rank)
    for _ in range(behind):
        if put_off:
            turns.do((W, put_off.pop(0)))
        turns.do((B, 0))
        put_off.append(0)
    for side in put_off:
        turns.do((W, side))
    return turns.line


def _drain_backwards(turns: ActionWriter, rank: int) -> list[int]:
    """The last backwards of both stages: whole ones, then only the gradients of inputs. The sides whose W has been put
    off, in order."""
    sides = [side for _ in range(rank + 1) for side in (1, 0)]
    whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for side in sides[:whole]:
        turns.do((ActionKind.B, side), (ActionKind.W, side))
    for side in sides[whole:]:
        turns.do((ActionKind.B, side))
    return sides[whole:]
