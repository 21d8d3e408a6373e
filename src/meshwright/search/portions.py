"""Shards by memory: of replicas on unlike groups, how much of the states each holds where equal shards do not fit.

Bytes of a rank are a + b w, w its shard as so many equal ones. What a group has left for it caps its w. All hold the same, 1, but for those whose
cap is less: they hold their cap, the others share out the rest, so that the largest shard, for which all wait, is as small as can be.
Whole weights: of PARTS parts the largest shard has all, the others as many as their w says, rounded down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from meshwright.cost.box import Array, Box
from meshwright.cost.memory import reserved, usable
from meshwright.cost.price import Pricer

PARTS = 16


def caps(on: Mapping[int, Pricer], box: Box) -> list[Array]:
    """For each group over `obsczf` the largest shard that fits on its devices, as so many equal ones; less than nothing where not even none does."""
    return [_cap(pricer, box) for pricer in on.values()]


def _cap(pricer: Pricer, box: Box) -> Array:
    ranks = pricer.ranks(box)
    none, one = (pricer.memory(replace(box, weight=weight), ranks).total for weight in (0.0, 1.0))
    _, taken = reserved(pricer.setting, none)
    _, more = reserved(pricer.setting, one)
    with np.errstate(divide="ignore", invalid="ignore"):
        cap = np.where(
            more > taken, (usable(pricer.setting) - taken) / (more - taken), np.where(taken <= usable(pricer.setting), np.inf, -1.0)
        )
    return np.broadcast_to(cap.min(axis=0), box.shape)


def shared(cap: Sequence[Array], replicas: Sequence[int]) -> Array:
    """Shards of each group (first axis) as so many equal ones, `replicas` on each; not a number where they do not fit together.

    >>> shared([np.array([0.5, 1.5, 0.5]), np.array([9.0, 1.5, 1.2])], [2, 2]).round(2).tolist()
    [[0.5, 1.0, nan], [1.5, 1.0, nan]]
    """
    limits = np.stack([np.maximum(each, 0.0) for each in cap])
    counts = np.array(replicas, dtype=float).reshape(-1, *[1] * (limits.ndim - 1))
    capped = np.zeros(limits.shape, dtype=bool)
    for _ in replicas:
        free = np.where(capped, 0.0, counts).sum(axis=0)
        rest = counts.sum() - (np.where(capped, limits, 0.0) * counts).sum(axis=0)
        level = rest / np.maximum(free, 1.0)
        capped |= limits < level
    held = np.where(capped, limits, level)
    fits = (np.abs((held * counts).sum(axis=0) - counts.sum()) < 1e-6) & (held > 0).all(axis=0)
    return np.where(fits, held, np.nan)


def weights(held: Sequence[float], replicas: Sequence[int]) -> tuple[int, ...]:
    """Whole weights of all replicas, group after group; empty where all hold the same.

    >>> weights([0.5, 1.5], [2, 2]), weights([1.0, 1.0], [2, 2])
    ((5, 5, 16, 16), ())
    """
    each = [max(int(PARTS * part / max(held)), 1) for part in held]
    if len(set(each)) == 1:
        return ()
    common = gcd(*each)
    return tuple(part // common for part, count in zip(each, replicas, strict=True) for _ in range(count))
