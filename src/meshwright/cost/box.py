"""A box of plans: those that share how ranks are laid out and the bucket, as the product of their other choices. The unit of vectorised pricing.

Prices of a box are arrays over AXES, each with length 1 along the axes that it does not depend on, so that NumPy's broadcasting does
each piece of work once, however many plans share it.

    r  kinds of pipeline ranks      o  orders: schedule and stages    b  micro-batch sizes
    s  sequence parallelism         c  recompute                      z  ZeRO stage, replicas and shards of the data ranks
    f  what is offloaded
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.spec.model import Parameter
from meshwright.spec.plan import AXES as PLAN_AXES
from meshwright.spec.plan import Axis, Context, Offload, Plan, Recompute, Schedule

AXES = "robsczf"
CHOICES = ("orders", "micro_batches", "sequence_parallel", "recompute", "shards", "offload")
"""Fields of a box along `obsczf`."""

Array = np.ndarray[Any, np.dtype[Any]]


def lift(array: Any, axes: str) -> Array:
    """`array`, whose dimensions are `axes` in this order, with length 1 along all other axes."""
    values = np.asarray(array)
    assert values.ndim == len(axes) and list(axes) == sorted(axes, key=AXES.index)
    return values.reshape([values.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES])


class Cut(NamedTuple):
    """Into how many parts ranks cut weights: tp, and experts over `ep` ranks of which `expert_tensor` share each."""

    tp: int
    ep: int = 1
    expert_tensor: int = 1

    def apart(self, parameter: Parameter) -> bool:
        """Whether its experts lie on unlike ranks."""
        return self.ep > 1 and parameter.experts > 0

    def numel(self, parameter: Parameter) -> int:
        """Elements on the fullest rank."""
        if self.apart(parameter):
            return -(-parameter.local_numel(self.expert_tensor) // self.ep)
        return parameter.local_numel(self.tp)


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


class Layout(NamedTuple):
    """How ranks are laid out but for the data ranks: what all plans of a box share. `recompute_layers` as in a plan."""

    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    expert_tensor: int = 1
    context: Context = Context.ring
    axes: tuple[Axis, ...] = PLAN_AXES
    recompute_layers: int = 0

    def strides(self, dp: int) -> dict[str, int]:
        """How far apart the ranks of each axis are, with `dp` data ranks, the context ranks inside of them."""
        found: dict[str, int] = {}
        inside = 1
        for axis in reversed(self.axes):
            found[axis] = inside
            inside *= {"tp": self.tp, "pp": self.pp, "dp": dp * self.cp}[axis]
        return found


@dataclass(frozen=True)
class Box:
    """All products of the choices. `micro_batches` pairs the sequences of a micro-batch with their number in a step."""

    layout: Layout
    bucket: int
    orders: tuple[Order, ...]
    micro_batches: tuple[tuple[int, int], ...]
    sequence_parallel: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    shards: tuple[Shards, ...]
    offload: tuple[tuple[Offload, ...], ...] = ((),)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def pp(self) -> int:
        return self.layout.pp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def cut(self) -> Cut:
        """Into how many parts ranks cut weights."""
        return Cut(self.tp, self.layout.ep, self.layout.expert_tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Choices along `obsczf`."""
        return tuple(len(getattr(self, name)) for name in CHOICES)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def legal_size(self) -> int:
        """How many of its plans are legal."""
        return int(np.count_nonzero(self.legal)) * (self.size // (len(self.orders) * len(self.micro_batches)))

    @cached_property
    def strides(self) -> dict[str, int]:
        """Of the axes, with the data ranks that all of `shards` have."""
        return self.layout.strides(self.shards[0].dp_replicate * self.shards[0].dp_shard)

    @property
    def holders(self) -> Array:
        """Ranks that share the states of a replica (z)."""
        return np.array([each.dp_shard * self.cp if each.zero else 1 for each in self.shards])

    @property
    def expert_holders(self) -> Array:
        """Ranks that share the states of an expert (z)."""
        apart = self.layout.ep * self.layout.expert_tensor
        return np.array([each.dp_shard * self.cp * self.tp // apart if each.zero else 1 for each in self.shards])

    @property
    def legal(self) -> Array:
        """Over AXES: interleaved orders take micro-batches in multiples of pp."""
        interleaved = np.array([order.schedule == Schedule.interleaved for order in self.orders])
        whole = np.array([count % self.pp == 0 for _, count in self.micro_batches])
        return lift(~interleaved[:, None] | whole[None, :], "ob")

    def part(self, **choices: Any) -> Box:
        """The box with fewer choices: indices along their axes by name of the field."""
        fewer: dict[str, Any] = {name: tuple(getattr(self, name)[at] for at in indices) for name, indices in choices.items()}
        return replace(self, **fewer)

    def only(self, index: tuple[int, ...]) -> Box:
        """The box that holds only the plan at `index` along `obsczf`."""
        return self.part(**{name: (at,) for name, at in zip(CHOICES, index, strict=True)})

    def plan(self, index: tuple[int, ...]) -> Plan:
        """The plan at `index` along `obsczf`."""
        order, micro_batch, parallel, recompute, shards, offload = (
            getattr(self, name)[at] for name, at in zip(CHOICES, index, strict=True)
        )
        return Plan(
            dp_replicate=shards.dp_replicate,
            dp_shard=shards.dp_shard,
            tp=self.tp,
            sequence_parallel=parallel,
            pp=self.pp,
            cp=self.cp,
            ep=self.layout.ep,
            zero=shards.zero,
            micro_batch=micro_batch[0],
            schedule=order.schedule,
            virtual_stages=order.virtual_stages,
            layers_per_stage=order.stage_layers if order.given else (),
            recompute=recompute,
            recompute_layers=self.layout.recompute_layers,
            offload=offload,
            bucket=self.bucket,
            context=self.layout.context,
            axes=self.layout.axes,
        )


def box_of(plan: Plan, batch: int, blocks: int) -> Box:
    """The box that holds only `plan`. Raises InputError when the batch or the blocks do not divide."""
    return Box(
        layout=Layout(plan.tp, plan.pp, plan.cp, plan.ep, plan.expert_tensor, plan.context, plan.axes, plan.recompute_layers),
        bucket=plan.bucket,
        orders=(Order(plan.schedule, plan.virtual_stages, plan.stage_layers(max(blocks, 1)), bool(plan.layers_per_stage)),),
        micro_batches=((plan.micro_batch, plan.micro_batches(batch)),),
        sequence_parallel=(plan.sequence_parallel,),
        recompute=(plan.recompute,),
        shards=(Shards(plan.zero, plan.dp_replicate, plan.dp_shard),),
        offload=(plan.offload,),
    )
