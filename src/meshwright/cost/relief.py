"""What recompute and offload can bring at best, before either is priced: the least bytes of a plan, and the least seconds.

[Note: least bytes] No number of recomputed blocks holds less than all of them but for what enters one block. While a block that recomputes runs
backward, every other one holds at least what enters it, as when all recompute; while one runs that does not, it holds all of itself, as one that
recomputes does then, but for what entered it. So states, and activations where all blocks recompute, less one such entry, is a bound below; it
stands where a block keeps no less, without its attention core, than enters it.

[Note: least seconds] Of the optimizer elsewhere nothing is hidden: the step changes by the update. Weights from the host cost at least the
slowdown of what runs beside them, and no micro-batch goes faster than the link.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost import constants, offload
from meshwright.cost.box import Again, Array, Box, lift
from meshwright.cost.memory import activations, kept, lasting, reserved
from meshwright.cost.price import Pricer, held
from meshwright.cost.reduction import update
from meshwright.spec.plan import Offload, Recompute


class Least(NamedTuple):
    """Bounds over `obsczf`, c one for all: bytes that a rank takes as estimated, and with the margin; seconds more than without offload; seconds
    of the whole step on the link."""

    taken: Array
    safe: Array
    more: Array
    link: Array


def least(pricer: Pricer, box: Box, offloads: tuple[tuple[Offload, ...], ...]) -> Least:
    """Of the plans of `box` with each of `offloads`, the first of which keeps all on the device, and any choice of recompute."""
    box = replace(box, recompute=(Again(Recompute.layer),), offload=offloads)
    setting, ranks = pricer.setting, pricer.ranks(box)
    states = pricer.states(box, ranks)
    alive = activations(setting, box, box.tokens(setting.job.workload.sequence), ranks.of_order)
    held_there = lasting(setting, box, states)
    on_device = sum(part * (1 - gone) for part, gone in zip(held_there, offload.gone(box), strict=True))
    bytes_ = (on_device + np.maximum(alive.at_head, alive.elsewhere) - _entering(pricer, box)).max(axis=0)
    taken, safe = reserved(setting, bytes_)
    there, elsewhere = offload.update(setting, box, held(box, states), update(setting, box, states))
    updating = there.max(axis=0) + elsewhere.max(axis=0)
    more, link = updating - updating[..., :1], lift(0.0, "")[0]
    if setting.host_bandwidth:
        weights = offload.away(box).parameters * held(box, states, zero=3) * (2.0 * setting.recipe.size / setting.host_bandwidth)
        counts = lift(box.counts, "b")[0]
        more = more + counts * constants.OVERLAP_SLOWDOWN * weights.min(axis=0)
        link = counts * weights.max(axis=0)
    return Least(taken, safe, more, link)


def _entering(pricer: Pricer, box: Box) -> Array:
    """Bytes that enter the block with the most, over (b, s); infinite where [Note: least bytes] does not stand."""
    setting = pricer.setting
    blocks = [kept(setting, entry, box, box.tokens(setting.job.workload.sequence)) for entry in setting.entries if entry.is_block]
    if not blocks:
        return lift(np.inf, "")
    stands = all((each.whole - each.core >= each.entering).all() for each in blocks)
    return lift(np.maximum.reduce([each.entering for each in blocks]), "bs") if stands else lift(np.inf, "")
