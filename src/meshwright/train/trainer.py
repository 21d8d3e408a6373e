"""Trains a model under a plan: `parallelize` shards the model and returns a `Trainer`, whose `step(batch)` makes one
optimizer step on all ranks. A user's script and the training loop (loop.py) call both.

Guarantees: the loss and the update equal those of one device on the global batch, up to the order of floating-point
sums. The loss is the sum over all valid labels of the global batch, divided by their number. It does not depend on how
the labels are distributed over the ranks. If the user passes a loss function (a mean over rows), the loss is instead
the mean over all rows of the global batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from meshwright.analysis.dry_run import in_eval_mode
from meshwright.core.ipc import RankPhase
from meshwright.core.messages import Message
from meshwright.runtime import state_dict
from meshwright.runtime.backend import backend_of, init_local_device
from meshwright.runtime.build.parallelize import make_parallel_context, parallelize_model
from meshwright.runtime.build.passes.record import ModelHints
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import ErrorPropagator
from meshwright.runtime.expert_parallel.load_balancing import update_expert_bias
from meshwright.runtime.float8 import check_precision_support
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.optim.param_groups import OptimizerFactory
from meshwright.runtime.optim.rule_probe import enable_fused_kernels
from meshwright.runtime.parameter_access import full_parameters, guard_stale_parameters, parameter_refs
from meshwright.runtime.preference_loss import REFERENCE_ENTRIES, ROW_ENTRY, recorded_log_probs
from meshwright.runtime.zero.param_group import offloaded_bytes
from meshwright.spec.estimate import MemoryBreakdown
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.precision import Recipe, recipe
from meshwright.spec.record import ProofMode, ProofResult, StepRecord
from meshwright.train.oom import MemoryReport, explain_oom
from meshwright.train.proof.proof_schedule import ProofSchedule, resolve_proof_mode
from meshwright.train.step.batch_forms import named_batch
from meshwright.train.step.inputs import LocalBatch, check_example, check_model_across_ranks
from meshwright.train.step.invariants import StepInvariants, retry_after_repair
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.row_counts import RowCounts
from meshwright.train.step.state import TrainState

if TYPE_CHECKING:
    from meshwright.checkpoint.memory_checkpoint import MemoryCheckpoint
    from meshwright.train.silent_corruption import SdcRecompute

__all__ = ["LocalBatch", "ParallelizeOptions", "Trainer", "parallelize"]


class ParallelizeOptions(ModelHints, total=False):
    """The optional arguments of `parallelize`."""

    offload_to: str | Path | None
    prove: ProofMode | None
    """When a proof run compares the plan with one device (train/proof/proof_schedule.py). The default 'auto' proves the
    plan before the first update if this is cheap. Other values are 'start', 'never', and a number of steps between
    proofs."""
    predicted: Sequence[MemoryBreakdown]
    """The planner's memory estimate of each pipeline rank, in order. An OOM error reports which category of memory
    exceeds its estimate."""
    deterministic: bool
    """Whether kernels of an accelerator return bitwise equal results for equal inputs. The backward of attention is
    then slower. On CPUs this is always so."""


def parallelize(
    model: nn.Module,
    optimizer: OptimizerFactory,
    plan: Plan | str,
    *,
    precision: str | Recipe = "fp32",
    clip: float | None = None,
    seed: int = 1,
    **options: Unpack[ParallelizeOptions],
) -> Trainer:
    """Shards `model` over the ranks of the default process group as `plan` says, and returns its trainer.

    `model` is an ordinary module with all layers, identical on every rank. `optimizer` receives parameters and returns
    a torch optimizer with one or more groups of them, or of the model's parameters. Each parameter has the attributes
    `path`, `is_matrix` (neither bias nor norm) and `in_block` (it belongs to a repeated block).

    The groups are made once, from full tensors (runtime/optim/param_groups.py). If the update rule is elementwise
    (AdamW, SGD, ...), the optimizer updates flat buffers. Otherwise (Muon, Adafactor, ...) it updates full tensors. A
    probe tests whether the rule is elementwise (runtime/optim/rule_probe.py).

    `precision` is a name or a recipe of `meshwright.recipe`. `clip` is the maximum norm of the gradient of all
    parameters. `loss(output, batch)` must return a mean over the rows of the batch; it is needed only if the model
    returns no logits. `anatomy` describes the structure of the model, from `meshwright.analysis.analyze` or written by
    hand; by default the model is analysed here. `offload_to` is a folder on a local disk for states that the plan
    offloads to disk; the default is the system's temporary folder. `example` is a batch of a few rows in the form that
    `step` takes. It is needed to analyse a model whose inputs cannot be inferred.

    Raises:
        InputError: The world size differs from that of the plan, or a dimension is not divisible as the plan requires.
    """
    calls = ErrorPropagator.of_default_group()
    with calls.call(nullcontext()):
        device = init_local_device()
        if options.get("deterministic") and not backend_of(device).memory_is_host:
            backend_of(device).make_deterministic()
        prove = resolve_proof_mode(options.get("prove"))
        example = check_example(model, options.get("example"), options.get("loss") is not None)
        plan = parse_plan(plan) if isinstance(plan, str) else plan
        check_model_across_ranks(model, plan, str(precision))
        chosen = recipe(precision) if isinstance(precision, str) else precision
        mesh = make_parallel_context(plan, device, offload_to=options.get("offload_to"), error_propagator=calls)
        check_precision_support(chosen, mesh.device)
        loss, gather, anatomy = options.get("loss"), options.get("gather"), options.get("anatomy")
        known = ModelHints(loss=loss, gather=gather, anatomy=anatomy, example=example)
        predicted = dict(enumerate(options.get("predicted", ()))).get(mesh.coords.pp)
        report = MemoryReport(mesh.rank, plan, mesh.device, predicted=predicted)
        with explain_oom(report, Message("before the first step")):
            prover = ProofSchedule(prove, model, loss, chosen.compute)
            before = parameter_refs(model)
            engine, groups = parallelize_model(model, mesh, chosen, optimizer, **known)
            guard_stale_parameters(engine, before)
            engine.updater.set_rounding_seed(engine.shards, seed)
            malloc_trim()
            torch.manual_seed(seed * 1_000_003 + (mesh.replica * plan.cp + mesh.coords.cp) * plan.pp + mesh.coords.pp)
            made = groups.build_optimizer(engine.updater.optimizer_params())
            # Adagrad creates its states at construction, other optimizers in their first step.
            engine.updater.set_stateless(() if made.state else engine.zero.param_names)
            enable_fused_kernels(made)
            prover.begin(engine)
            return Trainer(engine, made, clip, seed, prover, predicted)


class Trainer(TrainState):
    """The trainer of one rank, made by `parallelize`. It owns the run state: step, samples, loss scale."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        seed: int,
        prover: ProofSchedule,
        predicted: MemoryBreakdown | None,
    ) -> None:
        """`prover`: the schedule of proof runs. `predicted`: the planner's memory estimate of this rank, or None."""
        super().__init__(engine, optimizer, seed)
        self.clip, self.prover, self.predicted = clip, prover, predicted
        self.has_open_micro_batch = False
        """Whether the largest batch so far determines the size of micro-batches (`with_default_micro_batch`)."""
        self._most_rows = 0
        base = optimizer.defaults.get("lr") or 1.0
        self._ratios = [group.get("lr", base) / base for group in optimizer.param_groups]
        self.recount: SdcRecompute | None = None
        """Recomputes suspicious gradients if set (silent_corruption.py). The training loop sets it."""
        rows = RowCounts(prover.copy, lambda line: prover.say(line))
        engine.preflight.accepts_shorter_rows = rows.accepts_shorter_rows
        self.passes = StepPasses(StepInvariants(engine, optimizer, prover), rows)

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch: Batch | LocalBatch, wait: bool = True) -> StepRecord:
        """Runs forward, backward, reduction, clipping and the update. All ranks call it.

        `wait`: whether to wait for the updated weights. Without it, at ZeRO 1 and 2 the next forward overlaps with
        their all-gather. A torch operation on a parameter still waits, but compiled code that receives the parameter
        itself does not: `dist.broadcast(parameter)` would read or overwrite weights that have not arrived.

        `batch` is the global batch on every rank, a dict of tensors (rows, ...) or what a `DataLoader` yields
        (step/batch_forms.py), or a `LocalBatch` with this rank's rows. The last batch of an epoch may have any number
        of rows (step/inputs.py). If the gradient is not finite, all ranks skip the update.

        Raises:
            InputError: The batch is invalid or differs between ranks, or the user's code has made a change that a step
                does not allow (step/guards.py).
            PlanRefused: A proof run has found that the plan differs from one device, or a check has failed.
            InvariantViolated: The step has violated an invariant (step/invariants.py). The update was not made.
            OutOfMemory: An allocation has failed.
        """
        with _explain_errors(self, Message("in step {steps}", steps=self.steps + 1)):
            batch = self._named(batch)
            self.passes.check_around(self)
            self.prover.before(self, batch)
            record = self._step(batch)
            if wait:
                self.engine.zero.finish_gathers()
            return record

    def prove(self, batch: Batch | LocalBatch) -> ProofResult:
        """Compares the loss and every gradient of a few rows of `batch` under the plan with those of one device. All
        ranks call it and get the same result.

        Guarantees: weights, optimizer, buffers, random states and counters do not change.

        Raises:
            InputError: The model cannot be run on one device, or the proof is disabled ('never').
        """
        with _explain_errors(self, Message("in the proof before step {steps}", steps=self.steps + 1)):
            batch = self._named(batch)
            self.passes.check_around(self)
            return self.prover.prove(self, batch)

    def require_proof(self, reason: str) -> None:
        """Schedules a proof before the next update, for `reason` (a line for the user). All ranks call it. If the proof
        finds a difference, the next `step` raises PlanRefused."""
        self.prover.required = reason

    def _named(self, batch: Any) -> Batch | LocalBatch:
        """Returns `batch` by the names of forward's parameters (step/batch_forms.py). If the plan leaves the size of
        micro-batches open, a batch with more rows than all before determines it."""
        named = named_batch(self.engine.model, batch)
        if self.has_open_micro_batch and isinstance(named, dict) and (rows := num_rows(named)) > self._most_rows:
            self._most_rows = rows
            self.set_micro_batch(rows)
        return named

    def _step(self, batch: Batch | LocalBatch) -> StepRecord:
        began = time.perf_counter()
        self.engine.forget()
        compute = partial(self.passes.backward, self, batch)
        settled = compute if self.recount is None else partial(self.recount.settled, self, compute)
        loss, labels, squares = retry_after_repair(self, settled)
        outer = self.engine.outer
        own = squares[0 if outer is None else outer.replica] ** 0.5 / self.scale.factor
        norm = sum(squares) ** 0.5 / len(squares) ** 0.5 / self.scale.factor
        finite = norm == norm and norm != float("inf")
        scale_used = self.scale.factor
        if finite:
            self.on_phase(RankPhase.update)
            factor = 1.0 / scale_used
            if self.clip is not None and own + 1e-6 > self.clip:
                factor *= self.clip / (own + 1e-6)
            self.engine.updater.step(self.optimizer, factor, self.steps)
            here = {mixture.experts.path for mixture in self.engine.mixtures}
            update_expert_bias(self.engine.model, self.engine.anatomy, here, self.passes.loads)
        self.scale.update(finite)
        self.steps += 1
        if outer is not None and outer.is_due(self.steps):
            outer.sync()
        if self.steps == 1:  # the first step has created the optimizer states
            malloc_trim()
        self.samples += self.passes.rows
        seconds = time.perf_counter() - began
        exposed, sent = self.engine.measured()
        return StepRecord(
            step=self.steps,
            loss=loss,
            tokens=self.passes.tokens,
            gradient_norm=norm if finite else 0.0,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            seconds=seconds,
            exposed=exposed,
            sent=sent,
            tokens_per_second=self.passes.tokens / seconds,
            rates={"labels_per_token": labels / self.passes.tokens} if self.passes.tokens else {},
            memory={kind: float(size) for kind, size in self.bytes().items()},
            loss_scale=scale_used,
            skipped=not finite,
            experts=self.passes.expert_stats,
        )

    def load_weights(self, path: str | Path) -> None:
        """Loads the weights of a model that was built on the meta device. `path`: a folder with safetensors files, or a
        checkpoint. All ranks call it; each reads its own shards."""
        from meshwright.train.meta_init import load_sharded_weights

        with _explain_errors(self, Message("while weights are loaded")):
            load_sharded_weights(self.engine, path)

    def evaluate(self, batch: Batch | LocalBatch) -> float:
        """Returns the mean loss over the valid labels of the global batch, in eval mode. All ranks call it."""
        with (
            _explain_errors(self, Message("in an evaluation after step {steps}", steps=self.steps)),
            in_eval_mode(self.engine.model),
        ):
            batches, tokens = self.passes.split(self, self._named(batch))
            total = self.engine.forward_backward(batches, None) / self.plan.tp
            all_reduce(total, self.mesh.world).wait()
        return float(total) / max(tokens, 1)

    def reference_log_probs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the log-probabilities of the answers of preference pairs under the current weights, in eval mode, as
        the entries of a batch that DPO reads (runtime/preference_loss.py), (rows,) in float64 on every rank. Before the
        first step they are those of the reference: the initial model, which with LoRA is the base without adapters.
        `batch`: the global batch. All ranks call it."""
        rows = num_rows(batch)
        # The dry run of the stages calls a copy of the loss, which reads the entries that do not exist yet.
        entries = {**dict.fromkeys(REFERENCE_ENTRIES, torch.zeros(rows)), ROW_ENTRY: torch.arange(rows)}
        with recorded_log_probs(self.engine.objective, rows) as table:
            self.evaluate({**batch, **entries})
        table = (table if self.mesh.coords.tp == 0 else torch.zeros_like(table)).to(self.mesh.device)
        all_reduce(table, self.mesh.world).wait()
        return {name: table[:, at].cpu() for at, name in enumerate(REFERENCE_ENTRIES)}

    def gradients(self, batch: Batch | LocalBatch) -> tuple[float, int, dict[str, torch.Tensor] | None]:
        """Returns the mean loss, the number of valid labels, and on rank 0 the full gradients by parameter name (None
        on other ranks). Parameters without a gradient are left out. All ranks call it. It updates nothing."""
        with _explain_errors(self, Message("for the gradients of step {steps}", steps=self.steps + 1)):
            loss, tokens, _ = self.passes.backward(self, self._named(batch))
            full = state_dict.gather_full_tensors(self.engine, state_dict.gradient_pieces(self.engine))
        if full is None:
            return loss, tokens, None
        left = set(self.engine.zero.unused)
        return loss, tokens, {name: value / self.scale.factor for name, value in full.items() if name not in left}

    def close(self) -> None:
        """Waits until no other rank reads this rank's shared memory. Afterwards this process may end. Scripts that end
        normally need not call this method."""
        self.engine.zero.shutdown()

    # --- state ------------------------------------------------------------------------------------

    def learning_rate(self, lr: float) -> None:
        """Sets the learning rate. Each parameter group gets `lr` times the ratio of its initial rate to the default
        rate of the optimizer."""
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Returns a context that yields the full parameters of `module` (default: the model) by name, on every rank.
        All ranks must enter it. `write`: whether the parameters may be changed; all ranks must then write identical
        values. Otherwise they are read-only (runtime/parameter_access.py)."""
        return self.mesh.error_propagator.call(full_parameters(self.engine, module, write))

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Returns the state dict of the unsharded model in host memory on rank 0, and None on other ranks. All ranks
        must call it."""
        with self.mesh.error_propagator.call(nullcontext()):
            return state_dict.gather_state_dict(self.engine)

    def bytes(self) -> dict[str, int]:
        """Returns this rank's bytes of `parameters`, `gradients` and `optimizer` (states and main weights) that are not
        offloaded. If the plan offloads, `offloaded` has the offloaded bytes, including the peak of saved activations on
        disk."""
        stored = [(unit.weights.device_bytes(), unit.gradients.device_bytes()) for unit in self.engine.zero.units]
        optimizer = sum(unit.optim_shard.bytes() for unit in self.engine.zero.units if unit.has_main_params)
        optimizer += sum(unit.optim_shard.state_bytes() for unit in self.engine.zero.trainable)
        offloaded, depot = self.mesh.state_swapper, self.mesh.activation_store
        for values in self.optimizer.state.values() if offloaded is None or offloaded.optimizer is None else ():
            optimizer += sum(
                value.numel() * value.element_size()
                for value in values.values()
                if isinstance(value, torch.Tensor) and value.ndim
            )
        elsewhere = (offloaded_bytes(self.engine.zero.units) if offloaded is not None else 0) + (
            depot.peak_bytes if depot is not None else 0
        )
        ways = [way for unit in self.engine.zero.trainable for way in unit.compressors if way is not None]
        saved = sum(way.residual.numel() * way.residual.element_size() for way in ways)
        optimizer += self.engine.outer.bytes() if self.engine.outer is not None else 0
        return {
            "parameters": sum(weights for weights, _ in stored),
            "gradients": sum(gradients for _, gradients in stored) + saved,
            "optimizer": optimizer,
            **({"offloaded": elsewhere} if offloaded is not None or depot is not None else {}),
        }

    def resident_memory(self) -> dict[str, float]:
        """Returns the entries of `bytes` without `offloaded`: the bytes on this rank's device."""
        return {kind: float(size) for kind, size in self.bytes().items() if kind != "offloaded"}

    @property
    def passing(self) -> int:
        """Returns the bytes of the staging buffers for transfers to other ranks of the host and to offload files."""
        shared = self.mesh.shared_memory.staging_bytes if self.mesh.shared_memory is not None else 0
        return shared + sum(
            each.buffer_bytes for each in (self.mesh.state_swapper, self.mesh.activation_store) if each is not None
        )

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> Path:
        """Writes a checkpoint of the current step below `folder` and returns its path. `extra`: JSON values to store in
        it, such as the position in the data. `keep`: the number of newest checkpoints that remain in `folder`; 0: all.
        All ranks must call it."""
        from meshwright.train.trainer_checkpoint import save_trainer

        with self.mesh.error_propagator.call(nullcontext()):
            return save_trainer(self, Path(folder), extra or {}, keep)

    def resume(self, folder: str | Path) -> dict[str, Any] | None:
        """Restores the newest valid checkpoint below `folder` and returns its `extra`, or None if `folder` has no
        checkpoint. All ranks must call it.

        Raises: CorruptCheckpoint if `folder` has checkpoints, but none is valid.
        """
        from meshwright.train.trainer_checkpoint import resume_trainer

        with _explain_errors(self, Message("while a checkpoint is loaded")):
            return resume_trainer(self, Path(folder))

    def load(self, path: str | Path | MemoryCheckpoint) -> dict[str, Any]:
        """Restores a checkpoint that was written under any plan. Returns the `extra` that was passed to `save`. All
        ranks must call it."""
        from meshwright.train.trainer_checkpoint import load_trainer

        with _explain_errors(self, Message("while a checkpoint is loaded")):
            return load_trainer(self, Path(path) if isinstance(path, str) else path)


def _explain_errors(trainer: Trainer, doing: str) -> AbstractContextManager[None]:
    """Returns the context of a call that all ranks make. It propagates an exception to the other ranks, and explains an
    out-of-memory error in one line. `doing` says in this line when the error occurred. Writes to weights inside the
    context do not count as writes of the user."""
    holder = MemoryReport(
        trainer.mesh.rank, trainer.plan, trainer.mesh.device, trainer.resident_memory, trainer.predicted
    )
    return trainer.mesh.error_propagator.call(
        trainer.engine.zero.external_writes.internal_writes(explain_oom(holder, doing))
    )
