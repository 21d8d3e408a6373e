"""Implements the outer optimizer of DiLoCo: replicas update independently, and the trainer synchronises them every few
steps (source in spec/precision.py). The anchor is a copy of the weights after the last synchronisation. A
synchronisation computes:

    delta = mean over replicas of (anchor - weights of the replica)
    velocity = momentum x velocity + delta
    new anchor = anchor - lr x (delta + momentum x velocity)

`momentum` and `lr` are options of the outer optimizer. Between two synchronisations, replicas exchange only the loss,
norms and label counts of each step. The states of the inner optimizer are never exchanged. Anchors and velocity are
sharded like optimizer states. A checkpoint stores anchors and velocity, and the weights and optimizer states of every
replica.

Guarantees: except for the order of sums, the result equals that of one process that trains the replicas one after
another.
"""

from __future__ import annotations

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.precision import DilocoConfig, Recipe
from meshwright.spec.workload_constraints import diloco_violations


class OuterOptimizer:
    """The outer optimizer of this rank's flat parameter groups. `anchors` and `velocity` have one flat tensor for each
    trained group."""

    def __init__(self, config: DilocoConfig, reducer: GradReducer) -> None:
        self.config, self.reducer, self.units, self.replica = (
            config,
            reducer,
            reducer.trainable,
            reducer.mesh.coords.dp_replicate,
        )
        self.anchors = [unit.optim_shard.flat.detach().clone() for unit in self.units]
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchors]

    def scatter_by_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a vector with one element per replica: the scalar tensor `value` at the index of this rank's replica,
        and zeros for all other replicas. Summed over one rank of each replica, these vectors give a vector of the
        values of all replicas."""
        return torch.nn.functional.pad(value.view(1), (self.replica, self.config.replicas - self.replica - 1))

    def bytes(self) -> int:
        """Returns the number of bytes of anchors and velocity."""
        return sum(each.numel() * each.element_size() for each in (*self.anchors, *self.velocity))

    def is_due(self, steps: int) -> bool:
        """Returns whether replicas synchronise after training step `steps`."""
        return steps % self.config.steps == 0

    @torch.no_grad()
    def sync(self) -> None:
        """Synchronises the replicas. All ranks must call this method after the same step."""
        self.reducer.quiesce()
        # Parameter groups are reduced one after another, so that only one group at a time needs extra memory.
        for unit, anchor, velocity in zip(self.units, self.anchors, self.velocity, strict=True):
            moved = anchor - unit.optim_shard.flat
            all_reduce(moved, _replica_group(unit), inter_host=unit.compressors.replicas).wait()
            mean = moved.div_(self.config.replicas)
            velocity.mul_(self.config.momentum).add_(mean)
            anchor.sub_(mean.add_(velocity, alpha=self.config.momentum), alpha=self.config.lr)
            unit.optim_shard.flat.copy_(anchor)
            unit.copy_to_params()
        for pending in [unit.weights.all_gather() for unit in self.units]:
            pending.wait()

    @torch.no_grad()
    def restart(self) -> None:
        """Resets anchors to the current weights, and velocity to zero. Called when a run with DiLoCo resumes from a
        checkpoint of a run without DiLoCo."""
        for unit, anchor, velocity in zip(self.units, self.anchors, self.velocity, strict=True):
            anchor.copy_(unit.optim_shard.flat)
            velocity.zero_()


def make_outer_optimizer(recipe: Recipe, reducer: GradReducer) -> OuterOptimizer | None:
    """Returns the outer optimizer, or None if the recipe does not use DiLoCo.

    Raises:
        InputError: the plan does not support the recipe's DiLoCo options. For example, the plan and the recipe have
            different numbers of replicas.
    """
    if recipe.local is None:
        return None
    for violation in diloco_violations(reducer.mesh.plan, recipe.local):
        raise InputError(Message("plan {plan}: {message}", plan=reducer.mesh.plan.name, message=violation.message))
    return OuterOptimizer(recipe.local, reducer)


def _replica_group(unit: FlatParamGroup) -> CommGroup | None:
    assert unit.placement.diloco is not None, "only a DiLoCo recipe has independent replicas"
    return unit.placement.diloco.replicate_group
