"""Local steps: replicas update by themselves and meet every so many steps (spec/precision.py says what for, and the
source).

    moved = where they began - where a replica is, the mean over replicas
    velocity = momentum x velocity + moved
    where they go on from = where they began - lr x (moved + momentum x velocity)

Promise: equal, but for the order of sums, to one process that trains the replicas in turn. Nothing but the loss, the
norms and the labels of a
step crosses between replicas before they meet. Moments of the inner optimizer stay with each replica. What begins and
velocity are shared out
as the optimizer's states are, and a checkpoint holds them, with the weights and moments of every replica.
"""

from __future__ import annotations

import torch

from meshwright.core.errors import InputError
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.compression import make_compressed_reducer
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.zero.param_group import FlatParamGroup, flat_slice
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.constraints import diloco_violations
from meshwright.spec.precision import DilocoConfig, GradientCompression, Recipe


class OuterOptimizer:
    """The outer optimizer of this rank's flat units."""

    def __init__(self, rule: DilocoConfig, zero: GradReducer, compression: GradientCompression | None) -> None:
        self.config, self.reducer, self.units, self.replica = rule, zero, zero.trainable, zero.mesh.coords.dp_replicate
        for unit in self.units:
            unit.compressors = unit.compressors._replace(
                replicas=make_compressed_reducer(
                    compression,
                    _replica_group(unit),
                    flat_slice(unit, unit.shard_range, unit.optim_shard.flat),
                    scattered=False,
                )
            )
        self.anchors = [unit.optim_shard.flat.detach().clone() for unit in self.units]
        self.velocity = [torch.zeros_like(begun) for begun in self.anchors]

    def scatter_by_replica(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (0 dimensions) in the place of this rank's replica among zeros for the others: summed over all ranks,
        each replica's own."""
        return torch.nn.functional.pad(value.view(1), (self.replica, self.config.replicas - self.replica - 1))

    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (*self.anchors, *self.velocity))

    def is_due(self, steps: int) -> bool:
        """Whether replicas meet after this many steps."""
        return steps % self.config.steps == 0

    @torch.no_grad()
    def sync(self) -> None:
        """All replicas call it after the same step."""
        self.reducer.quiesce()
        for unit, begun, velocity in zip(
            self.units, self.anchors, self.velocity, strict=True
        ):  # one after the other: it is rare, and takes memory
            moved = begun - unit.optim_shard.flat
            all_reduce(moved, _replica_group(unit), inter_host=unit.compressors.replicas).wait()
            mean = moved.div_(self.config.replicas)
            velocity.mul_(self.config.momentum).add_(mean)
            begun.sub_(mean.add_(velocity, alpha=self.config.momentum), alpha=self.config.lr)
            unit.optim_shard.flat.copy_(begun)
            unit.copy_to_params()
        for pending in [unit.all_gather_params() for unit in self.units]:
            pending.wait()

    @torch.no_grad()
    def restart(self) -> None:
        """From the weights that are there, at rest: a run that was not in replicas goes on in replicas."""
        for unit, begun, velocity in zip(self.units, self.anchors, self.velocity, strict=True):
            begun.copy_(unit.optim_shard.flat)
            velocity.zero_()


def make_outer_optimizer(recipe: Recipe, zero: GradReducer) -> OuterOptimizer | None:
    """None where ranks sum in every step. Raises InputError where the plan does not hold as many replicas."""
    if recipe.local is None:
        return None
    for fault in diloco_violations(zero.mesh.plan, recipe.local):
        raise InputError(f"plan {zero.mesh.plan.name}: {fault.message}")
    return OuterOptimizer(recipe.local, zero, recipe.compression)


def _replica_group(unit: FlatParamGroup) -> CommGroup | None:
    assert unit.placement.diloco is not None, "replicas go their own ways only where the recipe says so"
    return unit.placement.diloco.replicate_group
