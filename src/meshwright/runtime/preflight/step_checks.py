"""Schedules the preflight checks of a plan (`Preflight`, which the engine calls before and after each step). This
module also contains the dry run of stages.

Batch norm (`check_batch_norm` in engine.py). One device computes the statistics of the whole batch. A plan divides the
batch into parts, the micro-batches of all data-parallel replicas, and computes the statistics of each part. That is a
different function, which no sum of gradients corrects. So a plan with more than one part is refused. An instance norm
has the same outputs and gradients for any division of the batch. But its running statistics, which evaluation reads,
depend on the samples of each part. So if a model has an instance norm with running statistics, plans with several parts
are refused too. Tensor ranks divide channels, which have separate statistics, so tensor parallelism is exact.

Inputs (`AnalysisGuard` in analysis_guard.py). A batch may have other inputs than the example of the analysis.

Stages. Before the first pass of a pipeline, a dry run runs each stage once, in stage order. If a stage cannot run, all
ranks refuse the plan together.

Rule: the dry run is one forward of one row (sample), the first of this rank's batch, without gradients and dropout. It
has only one row, because a model could treat two rows as a pair. A stage receives positive noise with the shapes of the
previous stage's output. After the dry run of a stage, all ranks exchange its outcome, so that no rank waits for a
message from a rank that failed. Every rank raises the first failure, before any training. The cost is one forward of
one row, plus one small gather per stage.

A stage may read a tensor that the stage boundary does not send, such as the skip connection of a U-Net. So in the dry
run of a stage, the blocks of all other stages return NaN, including other stages of this rank. If the stage then
returns NaN, the plan is refused.

Schedule. The dry run takes place once. Two more checks run before each of the training steps `CHECKED_STEPS`, counted
from the start of the process: the check of writes to parameters and buffers (user_writes.py), and the check that the
batch may be divided (batch_separability.py). They also run at later steps, because values that are zero or disabled in
the first steps often change later. Before the first evaluation, other checks run (evaluation_checks.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.analysis.dry_run import dry_run
from meshwright.analysis.own_generators import UsedGenerators
from meshwright.core.errors import InputError, MeshwrightError, PlanRefused
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of
from meshwright.runtime.backend import backend_of
from meshwright.runtime.engine import Engine, OncePerStepBuffers, PassRecorder
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import StageCursor
from meshwright.runtime.preflight.analysis_guard import AnalysisGuard
from meshwright.runtime.preflight.batch_separability import (
    check_batch_separable,
    check_evaluation_separable,
    check_joined_separable,
    count_pieces,
    find_row_count_difference,
)
from meshwright.runtime.preflight.code_paths import CodePaths, in_users_code
from meshwright.runtime.preflight.evaluation_checks import EvaluationAnalysis, sequence_refusal
from meshwright.runtime.preflight.random_mixing import check_random_mixing
from meshwright.runtime.preflight.row_batches import shorten_rows
from meshwright.runtime.preflight.user_writes import (
    check_pass_writes,
    check_replaced_storage,
    is_single_device_step,
)
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.runtime.tensor_parallel.random import check_own_generators
from meshwright.spec.plan import Plan

BoundaryShape = tuple[tuple[int, ...], torch.dtype]
StageForward = Callable[[int, dict[str, Any], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def dry_run_stages(
    model: nn.Module,
    mesh: ParallelContext,
    run: StageCursor,
    forward: StageForward,
    batch: dict[str, Any],
    loss: Any = None,
) -> None:
    """Runs every stage once, with one row of `batch` and with noise instead of the previous stage's output. Every rank
    calls this function. Restores the contents of `loss` if it is an object of the user.

    Raises:
        PlanRefused: a stage cannot run. Every rank raises the error of the first stage that cannot run.
    """
    forms: list[BoundaryShape] = []
    batch = {
        name: value[:1] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in batch.items()
    }
    with dry_run(model, loss=loss), _probing_placeholders(model, run):
        for stage in range(mesh.plan.stages):
            said: tuple[str, list[BoundaryShape]] = ("", [])
            if mesh.plan.stage_to_rank(stage) == mesh.coords.pp:
                said = _try_stage(mesh, stage, partial(_run_stage, mesh, forward, stage, batch, forms))
            everyone = gather_objects(said)
            for line, _ in everyone:
                if line:
                    raise PlanRefused(line)
            forms = everyone[mesh.pipeline_rank(mesh.plan.stage_to_rank(stage))][1]


@contextmanager
def _probing_placeholders(model: nn.Module, run: StageCursor) -> Iterator[None]:
    """Inside the context, the placeholders and blocks of other stages return NaN. On exit, resets only the blocks,
    because `dry_run` (analysis/dry_run.py) resets the placeholders."""
    for module in model.modules():
        if isinstance(module, StagePlaceholder):
            module.tried = True
    run.tried = True
    try:
        yield
    finally:
        run.tried = False


def _run_stage(
    mesh: ParallelContext, forward: StageForward, stage: int, batch: dict[str, Any], forms: list[BoundaryShape]
) -> tuple[torch.Tensor, ...]:
    """Returns the output of `stage` for noise with the shapes and dtypes `forms`.

    Raises:
        InputError: the stage returns NaN and is not the first stage.
    """
    output = forward(stage, batch, tuple(torch.rand(shape, dtype=dtype, device=mesh.device) for shape, dtype in forms))
    if stage and any(bool(tensor.isnan().any()) for tensor in output):
        raise InputError(
            Message(
                "plan {plan}: stage {stage} reads values that layers of an earlier stage compute but do not send, "
                "such as a skip connection of a U-Net: choose other layers per stage, or use pp1",
                plan=mesh.plan.name,
                stage=stage,
            )
        )
    return output


def _try_stage(
    mesh: ParallelContext, stage: int, run: Callable[[], tuple[torch.Tensor, ...]]
) -> tuple[str, list[BoundaryShape]]:
    """Runs one stage. Returns the reason why the stage cannot run ('' if it can), and the shapes and dtypes of its
    output. Does not catch OOM errors and lost connections, because the stage does not cause them."""
    try:
        with torch.no_grad(), backend_of(mesh.device).fork_rng(mesh.device):
            return "", [(tuple(tensor.shape), tensor.dtype) for tensor in run()]
    except (MemoryError, torch.OutOfMemoryError, ConnectionError):
        raise
    except InputError as error:
        return str(error), []
    except Exception as error:
        reason = reason_of(error)
        line = Message(
            "plan {plan}: stage {stage} of this model cannot run without layers of other stages ({reason}): use pp1",
            plan=mesh.plan.name,
            stage=stage,
            reason=reason,
        )
        return line, []


@contextmanager
def _refused_if_code_fails(plan: Plan, rows: int, pieces: int, of_torch: bool = False) -> Iterator[None]:
    """Refuses `plan` if the user's code fails inside the context, with the `rows` rows of a micro-batch or with fewer.
    One device does not run it with so few rows. If the batch has only one of `pieces`, errors are raised as they are.
    `of_torch`: whether only errors of torch functions count, such as wrong shapes. A script may catch its own errors in
    a micro-batch.

    Raises:
        PlanRefused: the model or its loss fails.
    """
    try:
        yield
    except (MeshwrightError, MemoryError, torch.OutOfMemoryError, ConnectionError):
        raise
    except Exception as error:
        if pieces == 1 or not in_users_code(error, of_torch):
            raise
        raise PlanRefused(
            Message(
                "plan {plan}: the model or its loss fails with some rows of a batch ({reason}), and this plan divides "
                "the batch into {pieces} parts of {rows} rows: use dp1 with the batch as one micro-batch, or code that "
                "runs with any number of rows",
                plan=plan.name,
                reason=reason_of(error),
                pieces=pieces,
                rows=rows,
            )
        ) from error


CHECKED_STEPS = frozenset({1, 2, 3, 10, 100, 1000})
"""Training steps before which checks run. The first step is 1."""
LAST_EARLY_STEP = 3
CHECKS_ENV = "MESHWRIGHT_CHECKS"
"""Name of an environment variable. The value `never` disables the checks of rows and writes in the first steps. It is
for runs that other code compares with one device."""


@dataclass
class Preflight:
    """Schedules the checks of one rank.

    `stages_run`: whether the dry run of the stages is done. `steps`: number of training steps that have begun.
    `checked`: the last step that began with the checks of rows and writes. `once`: buffers that change once per step.
    `began`: number of stage forwards that ran before the present step.
    """

    stages_run: bool = False
    steps: int = field(default_factory=lambda: LAST_EARLY_STEP if os.environ.get(CHECKS_ENV) == "never" else 0)
    checked: int = 0
    divided: bool = field(default_factory=lambda: os.environ.get(CHECKS_ENV) == "never")
    """Whether a batch in several parts has been checked. A batch in one part is not checked for coupled rows."""
    began: int = 0
    once: OncePerStepBuffers = field(default_factory=OncePerStepBuffers)
    written: set[str] = field(default_factory=set)
    """Names of the parameters that a pass of the model writes to."""
    generators: UsedGenerators = field(default_factory=UsedGenerators)
    """The `torch.Generator` objects that the passes of the checks have drawn from."""
    paths: PassRecorder = field(default_factory=CodePaths)
    """Records the code paths of models that read tensor values."""
    evaluation: EvaluationAnalysis | str = ""
    """The analysis that must run before the first evaluation, or why the model cannot be evaluated."""
    accepts_shorter_rows: Callable[[Engine, Batch, Batch], bool] | None = None
    """Returns whether a batch and its shorter rows run identical code (train/step/row_counts.py). None means no."""
    shortens: bool | None = None
    """Whether the checks use shorter rows, to need no more memory than a step. None: not known yet."""
    evaluated: bool = field(default_factory=lambda: os.environ.get(CHECKS_ENV) == "never")
    """Whether the rows of an evaluation have been checked."""
    analysed: AnalysisGuard | None = None
    """Repeats the analysis for batches that differ from its example; None if the plan does not depend on the
    analysis."""

    @property
    def is_skipped(self) -> bool:
        """Returns whether the checks of the first steps do not run, since an earlier process has passed them."""
        return self.steps >= LAST_EARLY_STEP

    def skip(self, stages: bool = True) -> None:
        """Skips the checks of the first steps. Callers use this if other checks replace them, or if no extra passes may
        run. `stages`: whether to skip the dry run of stages too."""
        self.stages_run |= stages
        self.steps, self.divided = max(self.steps, LAST_EARLY_STEP), True

    def before(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs the checks that are due before the micro-batches of a training step (`trains`) or of an evaluation.
        Every rank calls this method.

        Raises:
            PlanRefused: a check fails. Every rank raises it.
        """
        self.check(engine, batches, trains)
        self.steps += trains
        self.began = engine.run.passes
        engine.objective.divisors.clear()
        self.paths.begin_step()

    def check(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs the checks that are due before the next training step (`trains`) or evaluation."""
        if trains and self.analysed is not None:
            inputs = engine.objective.inputs(batches[0])
            self.analysed.check(inputs, engine.model.training, together=not self.steps)
        if not trains:
            self._check_evaluation_analysis(engine.mesh.plan)
        stages = engine.mesh.plan.stages > 1 and not self.stages_run
        due = self.steps + 1 in CHECKED_STEPS and self.steps + 1 != self.checked
        pieces = count_pieces(engine.mesh.plan, batches)
        is_divided = pieces > 1
        is_due = due or (is_divided and not self.divided) if trains else not self.evaluated
        if stages or is_due:
            engine.open_ungated()
            if stages:
                self._run_stages(engine, batches[0])
            if is_due and not trains:
                self.evaluated = check_evaluation_separable(engine, batches)
            elif is_due:
                parts = self._shortened(engine, batches)
                plan, rows = engine.mesh.plan, num_rows(batches[0])
                with self.paths.learning():
                    with _refused_if_code_fails(plan, rows, pieces, of_torch=True):
                        self.once.names = check_pass_writes(engine, parts)
                    check_own_generators(plan, self.generators.alive(), engine.run.keeping.generators)
                    with _refused_if_code_fails(plan, rows, pieces):
                        check_batch_separable(engine, parts)
                        if is_divided:
                            check_random_mixing(engine, parts, pieces)
                self.checked, self.divided = self.steps + 1, self.divided or is_divided
            engine.zero.reshard_all()
            engine.forget()
        self.once.made = {}

    def _run_stages(self, engine: Engine, batch: Batch) -> None:
        executor = engine.executor
        dry_run_stages(engine.model, engine.mesh, engine.run, executor.forward_stage, batch, engine.objective.loss)
        self.stages_run = True

    def _shortened(self, engine: Engine, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Returns `batches` with shorter rows (`shorten_rows`) if the model runs identical code for them."""
        short = shorten_rows(batches, divisor=2 if engine.mesh.plan.compile else 1)
        if self.shortens is None:
            self.shortens = bool((accepts := self.accepts_shorter_rows) and accepts(engine, batches[0], short[0]))
        return short if self.shortens else batches

    def _check_evaluation_analysis(self, plan: Plan) -> None:
        if isinstance(self.evaluation, EvaluationAnalysis):
            self.evaluation = next(filter(None, gather_objects(self.evaluation.objection())), "")
        if self.evaluation:
            raise PlanRefused(sequence_refusal(plan, self.evaluation))

    def again(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Repeats the checks for a step whose passes took unchecked code paths. Called after these passes and before
        the update. The gradients of the step do not change."""
        self.steps, self.checked, steps = 0, -1, self.steps
        try:
            self.check(engine, batches, True)
        finally:
            self.steps = self.checked = steps

    def compare_row_counts(self, engine: Engine, batches: Sequence[Batch], rows: int) -> tuple[float, float] | None:
        """Compares a forward of `rows` rows with forwards of micro-batches (batch_separability.py). Every rank calls
        this method, before a step. Raises PlanRefused if a stage cannot run."""
        engine.open_ungated()
        if engine.mesh.plan.stages > 1 and not self.stages_run:
            self._run_stages(engine, batches[0])
        with _refused_if_code_fails(engine.mesh.plan, num_rows(batches[0]), count_pieces(engine.mesh.plan, batches)):
            found = find_row_count_difference(engine, batches, rows)
        engine.zero.reshard_all()
        engine.forget()
        return found

    def compare_micro_batches(self, engine: Engine, batches: Sequence[Batch], pieces: int) -> None:
        """Compares a forward of all rows of `batches` with separate forwards, and raises PlanRefused if they differ.
        `pieces`: the number of micro-batches of the step on all ranks. Every rank calls it, after a step's passes."""
        engine.open_ungated()
        with self.paths.learning(), _refused_if_code_fails(engine.mesh.plan, num_rows(batches[0]), pieces):
            check_joined_separable(engine, batches, sum(map(num_rows, batches)), pieces)
        engine.zero.reshard_all()
        engine.forget()

    def after(self, engine: Engine, batches: Sequence[Batch], trains: bool) -> None:
        """Runs the checks that follow the micro-batches of a training step (`trains`) or of an evaluation."""
        self.once.put_back(engine.model, len(batches))
        if trains and self.steps in CHECKED_STEPS and is_single_device_step(engine, len(batches)):
            check_replaced_storage(engine)
