"""The engine of a sharded model: runs micro-batches through the stages of this rank, and leaves the gradients in the
flat parameter groups. `train/` uses it for each step and each evaluation.

`StageExecutor` runs one forward: one micro-batch through one stage. `Engine` runs all forwards and backwards of a step,
and the `preflight` checks before and after them. build/parallelize.py makes both objects and does not change them
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.analysis.batch_coupling import find_batch_norm
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.own_generators import UsedGenerators
from meshwright.analysis.recompute_tape import saved_tensor_state
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.activation_recompute import preserve_buffers
from meshwright.runtime.batch_loss import BatchLoss
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.load_balancing import ROUTER_LOGITS_FLAG, AuxLoss
from meshwright.runtime.expert_parallel.token_dispatcher import ExpertDispatcher
from meshwright.runtime.float8 import Float8Casts
from meshwright.runtime.loss import Batch, LossHead
from meshwright.runtime.non_tensor_state import ExtraState
from meshwright.runtime.offload.swap_file import ActivationStore
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.optim.updater import Updater
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper, StageCursor, StageExit
from meshwright.runtime.pipeline.runner import ScheduleRunner, StageTensors
from meshwright.runtime.shard.shard_table import ShardTable
from meshwright.runtime.tensor_parallel.random import forbid_python_rng
from meshwright.runtime.zero.diloco import OuterOptimizer
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.layout import LAYERS_BEFORE_BLOCKS
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe

GROUPS_BY_PARALLELISM = {
    "data": ("shards", "copies", "expert_shards", "expert_copies", "tie"),
    "tensor": ("tp", "expert_tensor", "expert_joined"),
    "context": ("cp", "rings", "heads"),
    "expert": ("experts",),
}
"""For each kind of parallelism, the names of the communication groups that it uses."""


def check_batch_norm(path: str, plan: Plan, passes: int) -> None:
    """Checks that a norm with batch statistics gets the whole batch at once.

    One device computes the statistics over the whole batch. A plan computes them separately for each of the
    dp x `passes` micro-batches. That is a different function, and no sum of gradients corrects it. Tensor ranks are
    allowed, because they divide channels, and each channel has its own statistics.

    `path`: a norm with batch statistics, or an instance norm with running statistics; '' if the model has none.
    `passes`: the number of micro-batches per replica.

    Raises:
        InputError: The model has such a norm, and the plan divides the batch.
    """
    if path and plan.dp * passes > 1:
        raise InputError(
            Message(
                "plan {plan}: {path} is a norm with batch statistics, and {dp} x {passes} parts of the batch have "
                "other statistics than the whole batch: use dp1 with the batch as one micro-batch (tp stays exact), "
                "use a norm without batch statistics (GroupNorm), or put it in eval mode, where its statistics are "
                "fixed",
                plan=plan.name,
                path=path,
                dp=plan.dp,
                passes=passes,
            )
        )


class OncePerStepBuffers:
    """Restores buffers that the forward of every micro-batch updates, but that must be updated once per step.

    The value of each buffer is recorded after the first forward of its stage, and restored after the last micro-batch
    of the step.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.names, self.made = names, dict[str, torch.Tensor]()

    def passed(self, executor: StageExecutor, stage: int) -> None:
        """Records the buffers of `stage`, if the forward that has ended is the stage's first forward in the step."""
        stages = executor.extra_state.buffer_stages
        present = dict(executor.model.named_buffers()) if len(self.made) < len(self.names) else {}
        for name in self.names & present.keys():
            if name not in self.made and stages.get(name, stage) == stage:
                self.made[name] = present[name].detach().clone()

    def put_back(self, model: nn.Module, passes: int) -> None:
        """Restores the recorded values after a step of `passes` micro-batches. After a step of one micro-batch, only
        discards them."""
        present = dict(model.named_buffers()) if self.made and passes > 1 else {}
        for name, value in self.made.items():
            if name in present:
                present[name].data.copy_(value)
        self.made = {}


class PassRecorder(Protocol):
    """Records the code paths of the user's model, and finds those that no check has run (preflight/code_paths.py). A
    code path is the set of a forward's call sites: positions in the user's code that call torch functions."""

    asks: bool
    """Whether the user's model code reads tensor values."""

    def recorded(self, stage: int, batch: object, compiles: bool) -> AbstractContextManager[Any]:
        """Records the forward of `stage` inside the context, if a check is running, or if the user's code reads tensor
        values and blocks are not compiled. `compiles`: whether blocks are compiled."""

    def begin_step(self) -> None:
        """Discards the forwards of the previous step."""

    def learning(self) -> AbstractContextManager[None]:
        """Marks the forwards inside the context as forwards of a check."""

    def taken(self, batches: Sequence[Any]) -> dict[tuple[int, int, int], int]:
        """Maps the stage, and checksums of each set of call sites of this step and of its numbers, to the index in
        `batches` of a micro-batch that has them."""

    def unknown(self, batches: Sequence[Any]) -> tuple[str, int]:
        """Finds a forward of this step whose set of call sites no check has run. Returns one of the call sites, and the
        index of the forward's micro-batch in `batches`. Returns ('', -1) if all sets are known."""

    def unrepeated(self) -> str:
        """Returns a call site that this step has reached and no check has reached, '' if there is none."""

    def accept(self) -> None:
        """Marks the sets of call sites of this step as checked."""


class StepChecks(Protocol):
    """The checks before and after the micro-batches of a step (preflight/step_checks.py)."""

    stages_run: bool
    """Whether the dry run of the stages is done."""
    accepts_shorter_rows: Callable[[Engine, Batch, Batch], bool] | None
    """Returns whether the model runs identical code for a batch and for the same batch with shorter rows."""
    steps: int
    """Number of training steps that have begun."""
    checked: int
    """The last training step that began with the check that the batch may be divided into micro-batches
    (preflight/batch_separability.py)."""
    began: int
    """Number of stage forwards that ran before the present step."""
    once: OncePerStepBuffers
    written: set[str]
    """Names of the parameters that a forward of the model writes to."""
    generators: UsedGenerators
    """The `torch.Generator` objects that the passes of the checks have drawn from."""

    @property
    def paths(self) -> PassRecorder:
        """The recorded code paths of a model that reads tensor values."""

    def skip(self, stages: bool = True) -> None:
        """Skips the checks of the first steps. `stages`: whether to skip the dry run of the stages too."""

    def before(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs `check`. Then begins a training step (`trains`) or an evaluation."""

    def check(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs the checks that are due before the next training step (`trains`) or evaluation."""

    @property
    def is_skipped(self) -> bool:
        """Whether the checks of the first steps do not run."""

    def compare_row_counts(self, engine: Engine, batches: Sequence[Batch], rows: int) -> tuple[float, float] | None:
        """Returns the losses of one forward of `rows` rows and of forwards of micro-batches, if they differ."""

    def compare_micro_batches(self, engine: Engine, batches: Sequence[Batch], pieces: int) -> None:
        """Compares a forward of all rows of `batches` with separate forwards. `pieces`: the number of micro-batches of
        the step on all ranks. Raises PlanRefused if they differ."""

    def again(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Repeats the checks for a step that took unchecked code paths. Called after its last backward and before its
        update."""

    def after(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs the checks after the micro-batches of a training step (`trains`) or of an evaluation."""


@dataclass
class StageExecutor:
    """Runs micro-batches through the stages of this rank, one stage at a time."""

    model: nn.Module
    mesh: ParallelContext
    anatomy: ModelGraph
    bounds: dict[int, tuple[int, int]]
    """For each stage: the index of its first block, and the index after its last block."""
    cursor: StageCursor
    reducer: GradReducer
    objective: LossHead
    extra_state: ExtraState
    checks: StepChecks
    mixtures: Sequence[ExpertDispatcher] = ()
    balance: AuxLoss | None = None
    context: ContextState | None = None
    batch_loss: BatchLoss | None = None
    """The loss function over the rows of all replicas, if the user chose it."""

    def set_plan(self, plan: Plan) -> ParallelContext:
        """Replaces the plan by one that differs only in the size of micro-batches. Returns the new context."""
        self.mesh = replace(self.mesh, plan=plan)
        return self.mesh

    @contextmanager
    def checked_by(self, checks: StepChecks) -> Iterator[None]:
        """Replaces `self.checks` by `checks` inside the context."""
        before, self.checks = self.checks, checks
        try:
            yield
        finally:
            self.checks = before

    def num_inputs(self, stage: int) -> int:
        """Returns the number of tensors that `stage` receives from the previous stage for each micro-batch."""
        carry = self.cursor.carry
        return (0 if carry is None else len(carry.spec.message(self.bounds[stage][0]))) + (self.balance is not None)

    def forward_stage(self, stage: int, batch: Batch, received: StageTensors) -> StageTensors:
        """Runs the forward of one micro-batch through `stage`. `received`: the tensors of the previous stage.

        Returns the tensors for the next stage. On the last stage returns (the sum of the losses,).
        """
        cursor, balance = self.cursor, self.balance
        cursor.start, cursor.stop = self.bounds[stage]
        cursor.passes += 1
        cursor.entered.clear()
        cursor.recording = saved_tensor_state() if self.mesh.plan.stages > 1 else None
        cursor.shared.put(stage)
        inputs = self.objective.inputs(batch)
        if balance is not None:
            balance.begin(batch, received[-1] if received else None)
            received = received[:-1]
            inputs = {**inputs, ROUTER_LOGITS_FLAG: False}
        if cursor.carry is not None:
            cursor.carry.begin(cursor.start, cursor.stop, received)
        for mixture in self.mixtures:
            mixture.begin_pass(batch)
        recorded = partial(self.checks.paths.recorded, stage, batch, self.mesh.plan.compile)
        try:
            buffers = preserve_buffers(self._buffers_of_other_stages(stage))
            with buffers, forbid_python_rng(self.mesh.plan, self.checks.steps > 1), recorded():
                self.reducer.finish_gathers(None if self.anatomy.blocks is None else LAYERS_BEFORE_BLOCKS)
                output = self.model(**inputs)
        except StageExit as done:
            self._check_blocks_run()
            return done.message if balance is None else (*done.message, balance.end())
        finally:
            self.checks.once.passed(self, stage)
            cursor.recording = None
            for mixture in self.mixtures:
                mixture.end_pass()
            if cursor.carry is not None:
                cursor.carry.forget()
            if self.context is not None:
                self.context.forget()
        self._check_blocks_run()
        self.reducer.finish_gathers()  # the loss may read parameters that no forward uses
        with recorded():
            total = self.objective.sum(output, batch)
        if balance is not None:
            sums = balance.end()
            # The loss of an evaluation excludes the load-balancing loss.
            total = total + balance.loss(sums) if torch.is_grad_enabled() else total
        return (total,)

    def _buffers_of_other_stages(self, stage: int) -> list[torch.Tensor]:
        """Returns the buffers that other stages of this rank update. A forward of `stage` must not change them, but it
        writes to them too, because every stage runs the model's code outside of blocks."""
        stages = self.extra_state.buffer_stages
        if self.mesh.plan.stages == self.mesh.plan.pp or not (stages and self.model.training):
            return []
        return [buffer for name, buffer in self.model.named_buffers() if stages.get(name, stage) != stage]

    def _check_blocks_run(self) -> None:
        """Checks that the last forward ran the same blocks as the first forward of its stage, and that no backward ran
        inside the last forward.

        If a forward skips a block (random depth), the rank's all-gathers and messages do not match those of other
        ranks. The gradients of a backward inside of a forward would be added to those of the step.
        """
        plan = self.mesh.plan
        if any(unit.wgrad_queue is not None and unit.wgrad_queue.is_open for unit in self.reducer.units):
            raise InputError(
                Message(
                    "plan {plan}: a block computes gradients inside its forward, but zero-bubble schedules delay the "
                    "weight gradients: use 1f1b or interleaved",
                    plan=plan.name,
                )
            )
        block = self.cursor.uneven()
        if block is not None and (plan.zero == 3 or plan.stages > 1):
            raise InputError(
                Message(
                    "plan {plan}: {block} runs in some forwards and not in others (layers dropped at random?), but "
                    "ZeRO 3 and pipelines need every block of a stage in every forward: turn layer dropping off "
                    "(layerdrop 0) or use z2 at most on pp1",
                    plan=plan.name,
                    block=self.anatomy.block(block),
                )
            )


@dataclass
class Engine:
    """Runs the forwards and backwards of a step. `pipeline` runs the micro-batches, and the reducer gets the gradients.
    `gates` are the wrappers of the blocks, and of the other modules whose weights are all-gathered."""

    executor: StageExecutor
    recipe: Recipe
    shards: ShardTable
    pipeline: ScheduleRunner
    gates: Sequence[BlockWrapper]
    updater: Updater
    experts: EpGroups | None = None
    outer: OuterOptimizer | None = None
    """The outer optimizer of local SGD (DiLoCo)."""
    unfilled: frozenset[str] = frozenset()
    """Names of the parameters on the meta device that have no values yet."""
    coupled_at_start: str = ""
    """The path of a norm that computed batch statistics when sharding began, '' if there was none. A norm in evaluation
    mode does not compute them."""
    float8_casts: Float8Casts | None = None
    """The casts of weights to float8, which the micro-batches of a step reuse. None if no layer is in float8."""

    @property
    def model(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.executor.model

    @property
    def mesh(self) -> ParallelContext:
        """The parallel context of the run."""
        return self.executor.mesh

    @property
    def anatomy(self) -> ModelGraph:
        """The structure of the whole model."""
        return self.executor.anatomy

    @property
    def zero(self) -> GradReducer:
        """The flat parameter groups and the reduction of their gradients."""
        return self.executor.reducer

    @property
    def objective(self) -> LossHead:
        """Computes the loss from the outputs of the model."""
        return self.executor.objective

    @property
    def batch_loss(self) -> BatchLoss | None:
        """The loss function over the rows of all replicas, None if the loss is a mean over rows."""
        return self.executor.batch_loss

    @property
    def run(self) -> StageCursor:
        """Tracks which stage is running."""
        return self.executor.cursor

    @property
    def extra_state(self) -> ExtraState:
        """Entries of the model's state dict that are not parameters."""
        return self.executor.extra_state

    @property
    def mixtures(self) -> Sequence[ExpertDispatcher]:
        """The expert dispatchers of this rank."""
        return self.executor.mixtures

    @property
    def balance(self) -> AuxLoss | None:
        """The load-balancing loss of experts."""
        return self.executor.balance

    @property
    def context(self) -> ContextState | None:
        """Runs the blocks on this rank's piece of the sequence. None without context parallelism."""
        return self.executor.context

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The global shape of each parameter, by name, in the order of the model's parameters."""
        return self.shards.shapes

    @property
    def preflight(self) -> StepChecks:
        """The checks before and after the micro-batches of a step."""
        return self.executor.checks

    def mark_initialized(self) -> None:
        """Marks all parameters as initialised."""
        self.unfilled = frozenset()

    def forward_backward(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """Runs forward, and backward of `scale` x loss, for all micro-batches of this rank's replica. Runs only forward
        if `scale` is None. All ranks call it.

        Returns the sum of the losses (float64 scalar) on the rank of the last stage, 0 on other ranks.

        Raises:
            InputError: A norm with batch statistics would get only a part of the batch. Or a check before, during or
                after the micro-batches refuses the batch or the model.
        """
        if scale is not None:
            check_batch_norm(self.statistics, self.mesh.plan, len(batches))
        self.zero.abort_step()
        self.preflight.before(self, batches, scale is not None)
        if scale is not None:
            self.zero.begin_step(len(batches))
            for mixture in self.mixtures:
                mixture.begin_step(batches)
        self.open_ungated()
        with nullcontext() if self.float8_casts is None else self.float8_casts.reused():
            total = self.pipeline.run(batches, scale)
        self.preflight.after(self, batches, scale is not None)
        self.zero.reshard_all()
        return total

    @property
    def statistics(self) -> str:
        """The path of a norm that computes batch statistics in its present mode (training or evaluation), '' if there
        is none.

        A pipeline rank has only some of the modules. So with several stages, the norm found before sharding
        (`coupled_at_start`) counts first.
        """
        return (self.coupled_at_start if self.mesh.plan.stages > 1 else "") or find_batch_norm(self.model)

    def forget(self) -> None:
        """Discards the times and byte counts since the last call of `measured`, for example those of a check."""
        for meter in (
            self.pipeline.wire.meter,
            *(meter for group in self.mesh.groups.values() for meter in group.timers),
        ):
            meter.discard()
        for store in self._offload_stores:
            store.wait_timer.discard()

    def measured(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the seconds for which this rank has waited since the last call, and the bytes that it has sent over
        the network since then. Both are dicts by kind of parallelism. The key 'offload' of the first is the seconds
        waited for offloaded data. The second is empty without a device mesh."""
        found = {name: group.read_stats() for name, group in self.mesh.groups.items()}
        kinds = {
            kind: [found[name] for name in names if name in found] for kind, names in GROUPS_BY_PARALLELISM.items()
        }
        # Ranks without a "data" group report "data" too, because the group of tied weights, which counts as "data",
        # exists only on some ranks.
        kinds = {kind: meters for kind, meters in kinds.items() if meters or kind == "data"}
        waited = {kind: sum(each.waited for each in meters) for kind, meters in kinds.items()}
        messages = self.pipeline.wire.meter.read()
        waited["pipeline"] = messages.waited
        waited |= (
            {"offload": sum(each.wait_timer.read() for each in self._offload_stores)} if self._offload_stores else {}
        )
        if self.mesh.device_mesh is None:
            return waited, {}
        sent = {kind: sum(each.sent for each in meters) for kind, meters in kinds.items()}
        return waited, sent | ({"pipeline": messages.sent} if self.mesh.plan.pp > 1 else {})

    @property
    def _offload_stores(self) -> list[StateSwapper | ActivationStore]:
        """The stores of offloaded states and activations of this rank."""
        return [each for each in (self.mesh.state_swapper, self.mesh.activation_store) if each is not None]

    def open_ungated(self) -> None:
        """All-gathers the weights of parameter groups that no module wrapper gathers (ZeRO 3). These weights stay
        gathered for the whole step."""
        for unit in self.zero.units:
            if not unit.hooked:
                unit.weights.unshard()
