"""The engine that runs the passes of a sharded model: micro-batches through this rank's stages, gradients in flat units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.parallel.context.blocks import Context
from meshwright.parallel.experts.balance import FLAG, Balance
from meshwright.parallel.experts.dispatch import Mixture
from meshwright.parallel.experts.ranks import ExpertRanks
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.objective import Batch, Objective
from meshwright.parallel.pipeline.gates import Gate, Run, StageDone
from meshwright.parallel.pipeline.play import Pipeline, Tensors
from meshwright.parallel.pipeline.rehearsal import rehearse
from meshwright.parallel.tensor.statistics import check_passes
from meshwright.parallel.zero.local import Outer
from meshwright.parallel.zero.zero import Zero
from meshwright.spec.precision import Recipe

KINDS = {
    "data": ("shards", "copies", "expert_shards", "expert_copies", "tie"),
    "tensor": ("tp", "expert_tensor", "expert_joined"),
    "context": ("cp", "rings", "heads"),
    "expert": ("experts",),
}
"""Groups by the kind of what goes through them."""


@dataclass
class Parallel:
    """The engine: `forward_backward` over micro-batches, gradients in `zero`, shapes and splits for checkpoints."""

    model: nn.Module
    mesh: Mesh
    recipe: Recipe
    anatomy: Anatomy
    shapes: dict[str, torch.Size]
    zero: Zero
    objective: Objective
    run: Run
    gates: list[Gate]
    bounds: dict[int, tuple[int, int]]
    pipeline: Pipeline
    outer: Outer | None = None
    experts: ExpertRanks | None = None
    mixtures: Sequence[Mixture] = ()
    context: Context | None = None
    aliases: frozenset[str] = frozenset()
    """Other names in the model's saved state: buffers, and tied weights under their second name."""
    unfilled: frozenset[str] = frozenset()
    """Parameters that were built without memory and have no values yet."""
    balance: Balance | None = None
    statistics: str = ""
    """A module with statistics over the batch."""
    rehearsed: bool = False
    """Every stage has been seen to run (pipeline/rehearsal.py)."""

    def forward_backward(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """All micro-batches of this rank's replica; sum of losses on the last stage. `scale` None: no gradients."""
        if self.mesh.plan.stages > 1 and not self.rehearsed:
            self._open_ungated()
            rehearse(self.model, self.mesh, self.stage_forward, batches[0])
            self.zero.close_all()
            self.rehearsed = True
        if scale is not None:
            check_passes(self.statistics, self.mesh.plan, len(batches))
            self.zero.begin_step(len(batches))
            for mixture in self.mixtures:
                mixture.begin_step(batches)
        if self.context is not None:
            self.context.waiting.seconds = 0.0
        self._open_ungated()
        total = self.pipeline.run(batches, scale)
        self.zero.close_all()
        return total

    def measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """Since it was last asked, by kind: seconds that this rank waited for others, and bytes that it sent over the network."""
        found = {name: group.measured() for name, group in self.mesh.groups.items()}
        kinds = {kind: [found[name] for name in names if name in found] for kind, names in KINDS.items()}
        waited = {kind: sum(each.waited for each in meters) for kind, meters in kinds.items() if meters}
        waited |= {"data": self.zero.exposed, "pipeline": self.pipeline.wire.exposed}
        waited |= {"offload": self.mesh.away.exposed} if self.mesh.away is not None else {}
        if self.context is not None:
            waited["context"] = self.context.waiting.seconds
        if self.mesh.device_mesh is None:
            return waited, {}
        sent = {kind: sum(each.sent for each in meters) for kind, meters in kinds.items() if meters}
        return waited, sent | ({"pipeline": self.pipeline.wire.sent} if self.mesh.plan.pp > 1 else {})

    def _open_ungated(self) -> None:
        """ZeRO 3: small units whose modules have no single forward (norms, positions) stay whole through the step."""
        for unit in self.zero.units:
            if not unit.gated:
                unit.open()

    def parts(self, stage: int) -> int:
        """Tensors that a stage is sent."""
        carry = self.run.carry
        state = 1 if carry is None else len(carry.wants.message(self.bounds[stage][0]))
        return state + (self.balance is not None)

    def stage_forward(self, stage: int, batch: Batch, received: Tensors) -> Tensors:
        """One micro-batch through one stage: the hidden state for the next one (or all that goes on), or the loss sum."""
        self.run.start, self.run.stop = self.bounds[stage]
        self.run.is_last = stage == self.mesh.plan.stages - 1
        inputs, balance = self.objective.inputs(batch), self.balance
        if balance is not None:
            balance.begin(batch, received[-1] if received else None)
            received = received[:-1]
            inputs = {**inputs, FLAG: False}
        self.run.received = received[0] if received and self.run.carry is None else None
        if self.run.carry is not None:
            self.run.carry.begin(self.run.start, self.run.stop, received)
        for mixture in self.mixtures:
            mixture.begin_pass(batch)
        try:
            output = self.model(**inputs)
        except StageDone as done:
            state = done.hidden if isinstance(done.hidden, tuple) else (done.hidden,)
            return state if balance is None else (*state, balance.end())
        finally:
            self.run.received = None
            for mixture in self.mixtures:
                mixture.end_pass()
            if self.run.carry is not None:
                self.run.carry.forget()
            if self.context is not None:
                self.context.forget()
        found = self.objective.sum(output, batch)
        if balance is not None:
            sums = balance.end()
            found = found + balance.loss(sums) if torch.is_grad_enabled() else found  # evaluation is of labels alone
        return (found,)
