"""Bytes of what changes the result and was asked for: gradients that a host keeps back of what it says in fewer bytes (parallel/exchange/compression.py),
and the two vectors of replicas that go their own ways (parallel/zero/local.py).

    kept back    one element for each element of what this rank sends to other hosts: of ZeRO 0 and of a scatter 1 / (ranks of its host) of the
                 buffer, of a sum over copies the shard; nothing where nothing leaves the host
    replicas     where they began and how fast they move: two elements of the optimizer's type for each that this rank updates
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.box import Array, Box, lift
from meshwright.cost.setting import Setting


def kept_back(setting: Setting, box: Box, whole: Array, shard: Array) -> Array:
    """Bytes over AXES; `whole` and `shard` are elements of the buffers of a rank and of its run."""
    asked, links = setting.job.workload.compression, setting.fabric
    if asked is None:
        return 0.0 * whole
    stride, holders = box.strides["dp"], [each.holders for each in box.shards]
    replicas = [each.replicas for each in box.shards]
    beside = max(links.domain // stride, 1) if links.handed else 1
    scattered = [1 / min(beside, count) if count > 1 and links.domain % (count * stride) else 0.0 for count in holders]
    apart = [max(beside // count, 1) for count in holders]
    summed = [
        1 / min(near, many) if many > 1 and links.domain % (many * count * stride) else 0.0
        for near, many, count in zip(apart, replicas, holders, strict=True)
    ]
    local = setting.job.workload.local is not None
    over_shards, over_copies = lift(np.array(scattered), "z") * whole, lift(np.array(summed), "z") * shard
    return (over_shards + over_copies * (setting.recipe.state_size if local else setting.gradient) / setting.gradient) * setting.gradient


def of_replicas(setting: Setting, shard: Array) -> Array:
    """Bytes over AXES."""
    return shard * (2.0 * setting.recipe.state_size * (setting.job.workload.local is not None))
