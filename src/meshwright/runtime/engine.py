"""The engine that runs the passes of a sharded model: micro-batches through this rank's stages, gradients in flat
units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.analysis.batch_coupling import find_batch_norm
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.remat.tape import saved_tensor_state
from meshwright.core.errors import InputError
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.load_balancing import ROUTER_LOGITS_FLAG, AuxLoss
from meshwright.runtime.expert_parallel.token_dispatcher import ExpertDispatcher
from meshwright.runtime.layout.partition import ExtraState
from meshwright.runtime.loss.objective import Batch, LossHead
from meshwright.runtime.offload.activation_store import ActivationStore
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper, StageCursor, StageExit
from meshwright.runtime.pipeline.runner import ScheduleRunner, StageTensors
from meshwright.runtime.preflight.step_checks import Preflight, check_batch_norm
from meshwright.runtime.recompute.policy import preserve_buffers
from meshwright.runtime.tensor_parallel.random import forbid_python_rng
from meshwright.runtime.zero.diloco import OuterOptimizer
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.precision import Recipe

GROUPS_BY_PARALLELISM = {
    "data": ("shards", "copies", "expert_shards", "expert_copies", "tie"),
    "tensor": ("tp", "expert_tensor", "expert_joined"),
    "context": ("cp", "rings", "heads"),
    "expert": ("experts",),
}
"""Groups by the kind of what goes through them."""


@dataclass
class Engine:
    """The engine: `forward_backward` over micro-batches, gradients in `zero`, shapes and splits for checkpoints."""

    model: nn.Module
    mesh: ParallelContext
    recipe: Recipe
    anatomy: ModelGraph
    shapes: dict[str, torch.Size]
    zero: GradReducer
    objective: LossHead
    run: StageCursor
    gates: list[BlockWrapper]
    bounds: dict[int, tuple[int, int]]
    pipeline: ScheduleRunner
    outer: OuterOptimizer | None = None
    experts: EpGroups | None = None
    mixtures: Sequence[ExpertDispatcher] = ()
    context: ContextState | None = None
    beside: ExtraState = field(default_factory=ExtraState)
    """What the model's saved state holds beside its parameters."""
    unfilled: frozenset[str] = frozenset()
    """Parameters that were built without memory and have no values yet."""
    balance: AuxLoss | None = None
    coupled_at_start: str = ""
    """A module of the whole model that took statistics over the batch when it was given."""
    preflight: Preflight = field(default_factory=Preflight)

    def forward_backward(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """All micro-batches of this rank's replica; sum of losses on the last stage. `scale` None: no gradients."""
        if scale is not None:
            check_batch_norm(self.statistics, self.mesh.plan, len(batches))
        self.zero.abort_step()
        self.preflight.before(self, batches, scale is not None)
        if scale is not None:
            self.zero.begin_step(len(batches))
            for mixture in self.mixtures:
                mixture.begin_step(batches)
        self.open_ungated()
        total = self.pipeline.run(batches, scale)
        self.preflight.after(self, batches, scale is not None)
        self.zero.reshard_all()
        return total

    @property
    def statistics(self) -> str:
        """Path of a module that takes statistics over the batch in the mode that it is in; '' where there is none. Of a
        pipeline, whose ranks hold some of
        the modules each, in the mode that it was given in."""
        return (self.coupled_at_start if self.mesh.plan.stages > 1 else "") or find_batch_norm(self.model)

    def forget(self) -> None:
        """What came since `measured` was last asked: an evaluation between two steps, say, is no part of either."""
        for meter in (
            self.pipeline.wire.meter,
            *(meter for group in self.mesh.groups.values() for meter in group.timers),
        ):
            meter.discard()
        for elsewhere in self._elsewhere:
            elsewhere.wait_timer.discard()

    def measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """Since it was last asked, by kind: seconds that this rank waited for others, and bytes that it sent over the
        network."""
        found = {name: group.read_stats() for name, group in self.mesh.groups.items()}
        kinds = {
            kind: [found[name] for name in names if name in found] for kind, names in GROUPS_BY_PARALLELISM.items()
        }
        kinds = {
            kind: meters for kind, meters in kinds.items() if meters or kind == "data"
        }  # a tie, which only some ranks have, is of that kind
        waited = {kind: sum(each.waited for each in meters) for kind, meters in kinds.items()}
        messages = self.pipeline.wire.meter.read()
        waited["pipeline"] = messages.waited
        waited |= {"offload": sum(each.wait_timer.read() for each in self._elsewhere)} if self._elsewhere else {}
        if self.mesh.device_mesh is None:
            return waited, {}
        sent = {kind: sum(each.sent for each in meters) for kind, meters in kinds.items()}
        return waited, sent | ({"pipeline": messages.sent} if self.mesh.plan.pp > 1 else {})

    @property
    def _elsewhere(self) -> list[StateSwapper | ActivationStore]:
        """What this rank waits for besides other ranks."""
        return [each for each in (self.mesh.state_swapper, self.mesh.activation_store) if each is not None]

    def open_ungated(self) -> None:
        """ZeRO 3: small units whose modules have no single forward (norms, positions) stay whole through the step."""
        for unit in self.zero.units:
            if not unit.hooked:
                unit.unshard()

    def _check_entered(self) -> None:
        """Raises InputError where a pass left out a block that another one ran (random depth): gathers and stages would
        no longer meet those of other ranks;
        and where it ran something backward itself, which would be taken for its gradients."""
        if any(unit.wgrad_queue is not None and unit.wgrad_queue.is_open for unit in self.zero.units):
            raise InputError(
                f"plan {self.mesh.plan.name}: a block takes gradients inside of its forward, where zero-bubble schedules put those of weights off: "
                "use 1f1b or interleaved"
            )
        plan, block = self.mesh.plan, self.run.uneven()
        if block is not None and (plan.zero == 3 or plan.stages > 1):
            raise InputError(
                f"plan {plan.name}: {self.anatomy.block(block)} runs in some passes and not in others (layers dropped at random?): ZeRO 3 and pipelines "
                "need every block of a stage in every pass: turn it off (layerdrop 0) or use z2 at most on pp1"
            )

    def parts(self, stage: int) -> int:
        """Tensors that a stage is sent."""
        carry = self.run.carry
        return (0 if carry is None else len(carry.wants.message(self.bounds[stage][0]))) + (self.balance is not None)

    def _of_others(self, stage: int) -> list[torch.Tensor]:
        """Buffers that another stage of this rank moves on: the model's own code comes by there on the way of each."""
        if self.mesh.plan.stages == self.mesh.plan.pp or not (self.beside.stages and self.model.training):
            return []
        return [buffer for name, buffer in self.model.named_buffers() if self.beside.stages.get(name, stage) != stage]

    def stage_forward(self, stage: int, batch: Batch, received: StageTensors) -> StageTensors:
        """One micro-batch through one stage: the message to the next one, or the loss sum."""
        self.run.start, self.run.stop = self.bounds[stage]
        self.run.passes += 1
        self.run.entered.clear()
        self.run.recording = saved_tensor_state() if self.mesh.plan.stages > 1 else None
        self.run.shared.put(stage)
        inputs, balance = self.objective.inputs(batch), self.balance
        if balance is not None:
            balance.begin(batch, received[-1] if received else None)
            received = received[:-1]
            inputs = {**inputs, ROUTER_LOGITS_FLAG: False}
        if self.run.carry is not None:
            self.run.carry.begin(self.run.start, self.run.stop, received)
        for mixture in self.mixtures:
            mixture.begin_pass(batch)
        try:
            with preserve_buffers(self._of_others(stage)), forbid_python_rng(self.mesh.plan, self.preflight.steps > 1):
                output = self.model(**inputs)
        except StageExit as done:
            self._check_entered()
            return done.message if balance is None else (*done.message, balance.end())
        finally:
            self.preflight.once.passed(self, stage)
            self.run.recording = None
            for mixture in self.mixtures:
                mixture.end_pass()
            if self.run.carry is not None:
                self.run.carry.forget()
            if self.context is not None:
                self.context.forget()
        self._check_entered()
        found = self.objective.sum(output, batch)
        if balance is not None:
            sums = balance.end()
            found = found + balance.loss(sums) if torch.is_grad_enabled() else found  # evaluation is of labels alone
        return (found,)
