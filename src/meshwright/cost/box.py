"""A box of plans: those that share tp, pp and the bucket, as the product of their other choices. The unit of vectorised pricing.

Prices of a box are arrays over AXES, each with length 1 along the axes that it does not depend on, so that NumPy's broadcasting does
each piece of work once, however many plans share it.

    r  kinds of pipeline ranks      o  orders: schedule and stages    b  micro-batch sizes
    s  sequence parallelism         c  recompute                      z  ZeRO stage, replicas and shards of the data ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.spec.plan import Plan, Recompute, Schedule

AXES = "robscz"
Array = np.ndarray[Any, np.dtype[Any]]


def lift(array: Any, axes: str) -> Array:
    """`array`, whose dimensions are `axes` in this order, with length 1 along all other axes."""
    values = np.asarray(array)
    assert values.ndim == len(axes) and list(axes) == sorted(axes, key=AXES.index)
    return values.reshape([values.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES])


class Order(NamedTuple):
    """A pipeline schedule with the blocks of each virtual stage; `given` when the plan names them."""

    schedule: Schedule
    virtual_stages: int
    stage_layers: tuple[int, ...]
    given: bool = False


class Shards(NamedTuple):
    """ZeRO stage and the two factors of the data ranks."""

    zero: int
    dp_replicate: int
    dp_shard: int


@dataclass(frozen=True)
class Box:
    """All products of the choices. `micro_batches` pairs the sequences of a micro-batch with their number in a step."""

    tp: int
    pp: int
    bucket: int
    orders: tuple[Order, ...]
    micro_batches: tuple[tuple[int, int], ...]
    sequence_parallel: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    shards: tuple[Shards, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Choices along `obscz`."""
        return len(self.orders), len(self.micro_batches), len(self.sequence_parallel), len(self.recompute), len(self.shards)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def legal(self) -> Array:
        """Over AXES: interleaved orders take micro-batches in multiples of pp."""
        interleaved = np.array([order.schedule == Schedule.interleaved for order in self.orders])
        whole = np.array([count % self.pp == 0 for _, count in self.micro_batches])
        return lift(~interleaved[:, None] | whole[None, :], "ob")

    def plan(self, index: tuple[int, ...]) -> Plan:
        """The plan at `index` along `obscz`."""
        order, micro_batch = self.orders[index[0]], self.micro_batches[index[1]]
        shards = self.shards[index[4]]
        return Plan(
            dp_replicate=shards.dp_replicate,
            dp_shard=shards.dp_shard,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel[index[2]],
            pp=self.pp,
            zero=shards.zero,
            micro_batch=micro_batch[0],
            schedule=order.schedule,
            virtual_stages=order.virtual_stages,
            layers_per_stage=order.stage_layers if order.given else (),
            recompute=self.recompute[index[3]],
            bucket=self.bucket,
        )


def box_of(plan: Plan, batch: int, blocks: int) -> Box:
    """The box that holds only `plan`. Raises InputError when the batch or the blocks do not divide."""
    return Box(
        tp=plan.tp,
        pp=plan.pp,
        bucket=plan.bucket,
        orders=(Order(plan.schedule, plan.virtual_stages, plan.stage_layers(max(blocks, 1)), bool(plan.layers_per_stage)),),
        micro_batches=((plan.micro_batch, plan.micro_batches(batch)),),
        sequence_parallel=(plan.sequence_parallel,),
        recompute=(plan.recompute,),
        shards=(Shards(plan.zero, plan.dp_replicate, plan.dp_shard),),
    )
