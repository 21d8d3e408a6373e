"""What of the space is left out before it is priced: rules of `spec.rules` that all plans of a layout, of an order or of a way to offload break alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from meshwright.cost.box import Order, Shards
from meshwright.spec.job import Job
from meshwright.spec.keeps import with_shares
from meshwright.spec.plan import ACTIVATIONS, Offload, Plan, Recompute
from meshwright.spec.rules import (
    Fault,
    Update,
    count_faults,
    division_faults,
    expert_faults,
    local_faults,
    offload_faults,
    sequence_faults,
    stage_faults,
    tensor_faults,
    update_faults,
)


class Orders(NamedTuple):
    """Of so many pipeline ranks: those that the update of the job goes with and those that it does not, and how many parts of blocks of each
    recompute."""

    kept: list[Order]
    lost: list[Order]
    parts: int
    lost_parts: int


class Updates:
    """What the update of a job goes with, and the counts of blocks that are pinned."""

    def __init__(self, job: Job) -> None:
        pins: dict[str, Any] = dict(job.pins)
        self.counted, self.sent = pins.get("recompute_layers", 0), pins.get("offload_layers", 0)
        self.shares = {name: value for name, value in with_shares(job.pins).items() if name in ("offload_share", "weights_share")}
        self.way = tuple(what for what in ACTIVATIONS if self.sent and what in pins.get("offload", ()))
        self.blocks = job.model.blocks
        self.update, self.local = Update.of(job.workload, job.cluster, job.model.layers), job.workload.local

    def against(self, plan: Plan) -> Fault | None:
        """Why it does not go with `plan`."""
        return next(chain(update_faults(plan, self.update), local_faults(plan, self.local), count_faults(plan, self.blocks)), None)

    def against_way(self, way: tuple[Offload, ...]) -> Fault | None:
        """Why not with any plan that offloads so."""
        replicas = self.local.replicas if self.local is not None else 1
        return self.against(Plan(dp_replicate=replicas, dp_shard=2, zero=3, offload=way, **self.shares)) if way else None

    def against_shards(self, shards: Shards, cp: int) -> bool:
        """Whether with no plan of these."""
        return self.local is not None and cp > 1 and not shards.zero

    def against_order(self, pp: int, order: Order) -> Fault | None:
        """Why not with any plan of this order."""
        if not self.update.recipe.products and max(self.counted, self.sent) <= max(
            order.stage_layers
        ):  # all other types go with all orders
            return None
        plan = Plan(
            pp=pp,
            schedule=order.schedule,
            virtual_stages=order.virtual_stages,
            actions=order.actions,
            layers_per_stage=order.stage_layers if pp > 1 and all(order.stage_layers) else (),
            recompute=Recompute.full if self.counted else Recompute.none,
            recompute_layers=self.counted,
            offload=self.way,
            offload_layers=self.sent,
        )
        return next(chain(update_faults(plan, self.update), count_faults(plan, self.blocks)), None)


def plans_of(shards: Sequence[Shards], ways: Sequence[tuple[Offload, ...]], whole: int, parts: int, orders: int, axes: int = 1) -> int:
    """How many plans of one micro-batch have these shards and ways to offload: of each of so many orders `whole` kinds of recompute, and of all of them so
    many `parts`. The first way goes with all `axes`."""
    kept = [sum(shard.keeps(way) for shard in shards) for way in ways]
    return (whole * orders + parts) * sum(kept) + whole * orders * (axes - 1) * sum(kept[:1])


def first_fault(job: Job, plan: Plan, updates: Updates) -> Fault | None:
    """The first rule that all plans of a layout break."""
    model = job.model
    rules = (
        tensor_faults(plan, model.divisible, model.tensor_parallel, model.shared_vocabulary),
        expert_faults(plan, model.experts),
        offload_faults(plan, job.cluster),
        update_faults(plan, updates.update),
        stage_faults(plan, max(model.blocks, 1), model.against_stages),
        sequence_faults(plan, job.workload.sequence),
        division_faults(plan, job.workload.batch, model.against_division),
    )
    return next(chain.from_iterable(rules), None)


def against_cut(job: Job, plan: Plan) -> Fault | None:
    """Why the sequence cannot be cut as `plan` does."""
    return next(sequence_faults(plan, job.workload.sequence, against=job.model.against_sequence), None)
