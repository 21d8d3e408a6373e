"""Scales a plan down for `meshwright verify`, so that it runs on the CPU cores of one machine. As far as possible, the
plan retains every kind of parallelism.

While there are too many ranks, the first of the degrees dp_replicate, dp_shard, cp, pp, tp that exceeds 2 is halved. If
all degrees are 1 or 2, the first degree of 2 becomes 1. ZeRO stage and recompute do not change. Sequence parallelism is
left out if tp becomes 1. The default schedule replaces one that is impossible with the new number of stages. A rank has
at most two virtual stages, unless a custom schedule needs more. A micro-batch has at most two sequences. ep becomes its
greatest common divisor with dp_shard x cp x tp. Unequal micro-batches, stages and shards stay unequal if the number of
replicas, stages or shards does not change, else they become equal.

>>> from meshwright.spec.plan import parse_plan
>>> scale_down_plan(parse_plan("dp16.tp4.pp8.z1.mb4")).name
'dp2.tp2.pp2.z1.mb2'
>>> scale_down_plan(parse_plan("dp4.z3.rc-full")).name
'dp4.z3.mb1.rc-full'
>>> (scale_down_plan(parse_plan("dp2.tp8.pp2.z3.zw3-1.place1-0")).name,
...     scale_down_plan(parse_plan("dp16.z3.zw" + "-".join("12" * 8))).name)
('dp2.tp2.pp2.z3.mb1.place1-0.zw3-1', 'dp8.z3.mb1')
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.spec.enums import DEFAULT_BUCKET_BYTES, DEFAULT_SCHEDULE
from meshwright.spec.plan import Plan

MAX_SCALED_DOWN_RANKS = 8
SCALED_DOWN_AXES = ("dp_replicate", "dp_shard", "cp", "pp", "tp")


def scale_down_plan(plan: Plan, most: int = MAX_SCALED_DOWN_RANKS) -> Plan:
    """Returns `plan` scaled down to at most `most` ranks. The bucket size becomes small, so that a small model has
    several buckets."""
    sizes = {axis: getattr(plan, axis) for axis in SCALED_DOWN_AXES}

    while math.prod(sizes.values()) > most:
        above = next((axis for axis in SCALED_DOWN_AXES if sizes[axis] > 2), None)
        if above is not None:
            sizes[above] = max(sizes[above] // 2, 2)
        else:
            sizes[next(axis for axis in SCALED_DOWN_AXES if sizes[axis] == 2)] = 1
    most_stages = plan.virtual_stages if plan.schedule_rules.listed else 2
    virtual = min(plan.virtual_stages, most_stages) if sizes["pp"] > 1 else 1
    plain = plan.virtual_stages > virtual == 1 or (plan.schedule_rules.listed and sizes["pp"] != plan.pp)
    virtual = 1 if plain else virtual
    changes: dict[str, Any] = {
        **sizes,
        "ep": math.gcd(plan.ep, sizes["dp_shard"] * sizes["cp"] * sizes["tp"]),
        "virtual_stages": virtual,
        "schedule": DEFAULT_SCHEDULE if plain else plan.schedule,
        "actions": () if plain else plan.actions,
        "sequence_parallel": plan.sequence_parallel and sizes["tp"] > 1,
        "micro_batch": min(plan.micro_batch, 2),
        "micro_batch_sizes": (),
        "layers_per_stage": (),
        "shares": (),
        "shard_weights": plan.shard_weights if sizes["dp_shard"] * sizes["cp"] == plan.shards else (),
        "placement": plan.placement if sizes["pp"] == plan.pp else (),
        "bucket": min(plan.bucket, DEFAULT_BUCKET_BYTES // 2**10),
    }
    if plan.shares and sizes["dp_replicate"] * sizes["dp_shard"] == plan.dp:
        changes["shares"] = tuple(2 * sizes["pp"] + (count > min(plan.shares)) for count in plan.shares)
    if plan.micro_batch_sizes and sizes["dp_replicate"] * sizes["dp_shard"] == plan.dp:
        changes["micro_batch_sizes"] = tuple(
            1 + (size > min(plan.micro_batch_sizes)) for size in plan.micro_batch_sizes
        )
    if plan.layers_per_stage and len(plan.layers_per_stage) == sizes["pp"] * virtual:
        fewest = min(plan.layers_per_stage)
        changes["layers_per_stage"] = tuple(1 + (count > fewest) for count in plan.layers_per_stage)
    return plan.but(**changes)
