"""Decides before which updates a proof run compares the plan with one device (proof_run.py), and refuses a plan that
differs. The trainer calls it before every update.

| mode | proofs |
|---|---|
| `auto` | before the first update, if the proof is cheap (`is_proof_cheap`) |
| `start` | before the first update |
| a number n | before the first update and every n steps |
| `never` | none |

Unless the mode is `never`, a cheap proof is repeated before a few later updates (REPEAT_UPDATES). In two other cases
there is no proof:
- DiLoCo, or a loss that reads parameters of the model: no proof is possible.
- Before the first update, a plan that is plain torch on one device (`is_one_device`), with the batch as one micro-batch
  and without reduced-precision matrix products.

All ranks make the same decision. If it depends on measured times, a proof runs only if every rank finds it cheap. If a
plan differs from one device, all ranks raise PlanRefused before the update.

If `parallelize` is called without `prove`, the environment variable `MESHWRIGHT_PROVE` (auto, start, never or a number
of steps) sets the mode. Without this variable the mode is `auto`.

The reference of a proof uses a copy of the model that was made before sharding. The schedule updates the attributes of
its modules that have changed since then, such as step counters.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.model_copy import ModelCopy, copy_to_meta
from meshwright.core.errors import InputError, PlanRefused
from meshwright.core.ipc import RankPhase
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.units import show_seconds
from meshwright.runtime.backend import backend_of
from meshwright.runtime.batch_loss import comparison_rows
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import shrink_staging_buffers
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.loss import Batch, LossFunction, num_rows
from meshwright.runtime.preflight.numeric_probes import weight_fingerprints
from meshwright.spec.constraints import half_sequence_length
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan
from meshwright.spec.record import (
    CHEAP_PROOF_FRACTION,
    CHEAP_PROOF_SECONDS,
    CHEAP_PROOF_STEPS,
    ProofCost,
    ProofMode,
    ProofResult,
    RecordedProof,
    is_proof_cheap,
    validate_proof_mode,
)
from meshwright.train.proof.proof_batches import sequence_length
from meshwright.train.proof.proof_run import NothingProven, ProofRun, ReferenceTooLarge
from meshwright.train.proof.stored_values import (
    StoredValues,
    apply_changes,
    apply_functions,
    changed_values,
    stored_functions,
    stored_values,
)
from meshwright.train.step.guards import SizeRanges
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.state import TrainState


def follow_frozen(model: nn.Module, engine: Engine) -> None:
    """Freezes the parameters of the copy `model` that are frozen in the trained model. All ranks call it.

    Raises:
        InputError: some ranks train a parameter that others have frozen. Every rank raises it.
    """
    stored = {
        name: parameter.requires_grad for unit in engine.zero.units for name, parameter in unit.parameters.items()
    }
    everyone = gather_objects(stored)
    trained, frozen = (
        {name for each in everyone for name, is_trained in each.items() if is_trained is wanted}
        for wanted in (True, False)
    )
    if trained & frozen:
        name = min(trained & frozen, key=list(engine.shapes).index)
        ranks = [str(rank) for rank, each in enumerate(everyone) if each.get(name) is False]
        raise InputError(
            Message(
                "{name} is frozen on ranks {ranks} and trained on others: call requires_grad_ on every rank",
                name=name,
                ranks=", ".join(ranks),
            )
        )
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


PROVE_VARIABLE = "MESHWRIGHT_PROVE"
REPEAT_UPDATES = (1, 9, 99, 999)
"""A cheap proof is repeated after these numbers of updates of this process: before its steps 2, 10, 100 and 1000."""
ANNOUNCE_SECONDS = 10.0
"""A proof is announced to the user if its estimated duration exceeds this."""


def resolve_proof_mode(given: ProofMode | None) -> ProofMode:
    """Returns `given`, or the mode that the environment variable sets, or 'auto'. Raises InputError if the mode is
    invalid."""
    if given is not None:
        return validate_proof_mode(given)
    said = os.environ.get(PROVE_VARIABLE, "auto")
    return validate_proof_mode(int(said) if said.isdecimal() else said)  # type: ignore[arg-type]


UNREADABLE_LOSS_REASON = Message(
    "the loss reads parameters in addition to the output, but a proof compares with a copy of the model, which has "
    "its own parameters"
)
"""Why a plan is not proven if the loss function itself reads parameters of the model."""


TOO_LARGE_TEXT = mark_msgid(
    "plan {plan}: rank 0 has too little memory to compute {tokens} tokens of each row as one device does ({problem}); "
    "prove='never' trains without a proof"
)


class ProofSchedule:
    """The schedule of proofs of one trainer. All ranks make equal calls.

    The training loop may set three attributes. `say` gets lines for the user, `record` gets the result of every proof,
    and `predicted` is the planner's estimate of a proof.
    """

    def __init__(self, mode: ProofMode, model: nn.Module | None, loss: LossFunction | None, compute: str = "") -> None:
        """`model`: the user's model before sharding. `loss`: the user's loss, or None. `compute`: the name of the dtype
        of the computation. Raises InputError if the model cannot be copied."""
        self.mode = mode
        self.copy: ModelCopy | None = None
        """The copy of the model on the meta device, or None if it cannot be copied and no proof is due."""
        try:
            self.copy = None if model is None else copy_to_meta(model, loss)
        except InputError as error:
            if mode != "never":
                raise InputError(
                    Message("no proof run: {error}, or train without it with prove='never'", error=error)
                ) from None
        self.skeleton = None if mode == "never" else self.copy
        self.fingerprints = (
            {}
            if self.skeleton is None or model is None or not _is_rank_0()
            else weight_fingerprints(model, getattr(torch, compute))
        )
        self.versions: list[int] = []
        """The version counters of this rank's weights directly after sharding (`weight_versions`)."""
        self.sizes = SizeRanges()
        """The sizes of batches for which a proof has passed."""
        self.plain: StoredValues = {}
        """The plain values that the skeleton (the copy of the model without weights) has now."""
        self.functions: dict[tuple[str, str], Any] = {}
        """The functions that the skeleton stores now."""
        self.required = ""
        """Why the next update requires a proof, as a text for the user, or ''."""
        self.reason = ""
        """Why the last proof before an update was due."""
        self.last: ProofResult | None = None
        self.skipped = ""
        """Why the proof before the first update did not run, or ''."""
        self.say: Callable[[str], None] = lambda line: None
        self.record: Callable[[ProofResult], None] = lambda proof: None
        self.predicted = ProofCost()
        self.longest = 0
        """The number of tokens of each row that a proof reads because more take too long or do not fit in memory; 0
        if `predicted` decides."""
        self.expected_seconds = 0.0
        """The predicted seconds of the last proof, with the measurement of rounding if it took place."""
        self._updates = 0
        self._seconds = 0.0
        """The seconds of the last proof before an update; 0 if there was none."""
        self._began = time.perf_counter()

    def begin(self, engine: Engine) -> None:
        """Records the versions of the weights and the plain values. `parallelize` calls it after sharding."""
        self.versions = weight_versions(engine)
        self.plain = stored_values(engine.model, engine.objective.loss)
        self.functions = stored_functions(engine.model)

    def before(self, state: TrainState, batch: Batch | LocalBatch) -> None:
        """Runs a proof if it is due before the update on `batch`. Raises PlanRefused on all ranks if the plan differs
        from one device."""
        reason = self._reason(state, batch)
        self._updates += 1
        if not reason:
            return
        when = f"again ({reason})" if self.required else reason
        if self.predicted.seconds > ANNOUNCE_SECONDS:
            self.say(_announcement(when, self.predicted))
        state.on_phase(RankPhase.prove)
        try:
            run_preflight(state, batch)
            self._prove_or_refuse(state, batch, reason, when)
        finally:
            state.on_phase(RankPhase.data)

    def during(self, state: TrainState, batch: Batch | LocalBatch, reason: str) -> None:
        """Runs a proof for `reason` after the backward of a step and before its update. This proof is due if no earlier
        proof covers the conditions of the step. The gradients of the step are restored. Raises PlanRefused as `before`
        does."""
        stored = [(unit, unit.gradients.shard.to("cpu", copy=True)) for unit in state.engine.zero.trainable]
        state.on_phase(RankPhase.prove)
        try:
            self._prove_or_refuse(state, batch, reason, f"again ({reason})")
        finally:
            state.on_phase(RankPhase.agree)
        state.engine.zero.quiesce()
        for unit, gradients in stored:
            unit.gradients.shard.copy_(gradients)

    def _prove_or_refuse(self, state: TrainState, batch: Batch | LocalBatch, reason: str, when: str) -> None:
        if state.engine.objective.unreadable.is_used:
            self.required = ""
            self.skipped = Message(
                "the plan is not proven: {unreadable_loss_reason}", unreadable_loss_reason=UNREADABLE_LOSS_REASON
            )
            self.say(self.skipped)
            return
        try:
            proof = self.prove(state, batch)
            if not proof.equal and state.mend():  # a replica had wrong weights, so the plan may be right
                proof = self.prove(state, batch)
        except ReferenceTooLarge as error:
            if self.mode != "auto":
                raise
            self.required, self.skipped = "", Message("the plan is not proven: {error}", error=error)
            self.say(self.skipped)
            return
        except NothingProven as nothing:
            self.required = reason  # the batch, not the plan, prevents a comparison
            self.say(Message("{nothing}; the next update is proven instead", nothing=nothing))
            return
        is_repeated = self._updates > 1 and reason == _before_step(state.steps)
        shown = self.reason != reason and not is_repeated
        self.reason, self.required = reason, ""
        self._seconds = proof.seconds
        self.record(proof)
        if proof.equal and shown:
            self.say(_passed_line(proof, when, self.expected_seconds))
        if not proof.equal:
            raise PlanRefused(
                Message(
                    "plan {plan}: the proof run differs from one device: {line}: use another plan (data parallelism "
                    "alone changes least), or train without the proof with prove='never'",
                    plan=proof.plan,
                    line=proof.line,
                )
            )

    def prove(self, state: TrainState, batch: Batch | LocalBatch) -> ProofResult:
        """Runs a proof now and returns its result. All ranks call it.

        If rank 0 has too little memory, the proof is repeated with half of the tokens of each row.

        Raises: NothingProven if `batch` allows no comparison. InputError if no proof is possible: with mode 'never',
        with DiLoCo, with a loss that reads parameters, or if one device cannot run the model.
        """
        if self.skeleton is None:
            raise InputError(
                Message(
                    "with prove='never' there is no copy of the model to compare with: call parallelize with "
                    "prove='auto'"
                )
            )
        if state.engine.outer is not None:
            raise InputError(
                Message(
                    "replicas that take local steps have no single device to compare with: the proof runs only "
                    "without local steps"
                )
            )
        if state.engine.objective.unreadable.is_used:
            raise InputError(
                Message("no proof: {unreadable_loss_reason}", unreadable_loss_reason=UNREADABLE_LOSS_REASON)
            )
        state.engine.zero.external_writes.sync(state.engine)
        now, functions = (
            stored_values(state.engine.model, state.engine.objective.loss),
            stored_functions(state.engine.model),
        )
        apply_changes(self.skeleton.model, self.skeleton.loss, changed_values(self.plain, now))
        apply_functions(self.skeleton.model, self.functions, functions)
        follow_frozen(self.skeleton.model, state.engine)
        self.plain, self.functions = now, functions
        unchanged = state.steps == 0 and weight_versions(state.engine) == self.versions
        while True:
            run = ProofRun(state, self.skeleton, self.fingerprints if unchanged else None)
            try:
                self.last = run.prove(batch, self.longest or self.predicted.length)
                break
            except ReferenceTooLarge as error:
                problem = str(error)
            self._shorten(state, run.length, problem)
        self.expected_seconds = self.predicted.seconds + self.predicted.rounding * run.measures_rounding
        if self.last.equal:
            self.sizes.add(run.compared)
        self.fingerprints = {}  # updates change the weights, so later proofs cannot use the fingerprints
        self._free_memory(state)
        return self.last

    def _shorten(self, state: TrainState, length: int, problem: str) -> None:
        """Halves the length of proofs after rank 0 had too little memory for `length` tokens of each row. Raises
        ReferenceTooLarge if they cannot be shorter. All ranks call it."""
        self.longest = half_sequence_length(state.plan, length)
        self._free_memory(state)
        if not self.longest:
            raise ReferenceTooLarge(Message(TOO_LARGE_TEXT, plan=state.plan.name, tokens=length, problem=problem))

    def _free_memory(self, state: TrainState) -> None:
        """Frees the memory of a proof. Its reference leaves cycles of references to weights and gradients."""
        gc.collect()
        shrink_staging_buffers([state.mesh.world])
        malloc_trim()

    def resume(self, earlier: RecordedProof, updates: int) -> None:
        """Accepts `earlier`, a proof that this plan passed before the run was resumed, so that the proof before the
        first update is skipped. `updates`: the number of completed steps."""
        self.last, self._seconds, self._updates = earlier.result, max(earlier.result.seconds, 1e-3), max(updates, 1)
        self.sizes = SizeRanges(earlier.sizes)

    @property
    def proven(self) -> bool:
        """Returns whether the last proof found the plan equal to one device."""
        return self.last is not None and self.last.equal

    # --- schedule ---------------------------------------------------------------------------------

    def _reason(self, state: TrainState, batch: Batch | LocalBatch) -> str:
        if self.mode == "never":
            return ""
        if state.engine.outer is not None:
            if not self.skipped:
                self.skipped = Message(
                    "plan {plan} is not proven: replicas that take local steps have no single device to compare with",
                    plan=state.plan.name,
                )
                self.say(self.skipped)
            return ""
        if self.required:
            return self.required
        if isinstance(self.mode, int) and self._updates and not state.steps % self.mode:
            return Message("every {mode} steps", mode=self.mode)
        if self._updates == 0:
            self.skipped = self._why_not(state, batch)
            if self.skipped:
                self.say(self.skipped)
            return "" if self.skipped else _before_step(state.steps)
        if not self._seconds or self._updates not in REPEAT_UPDATES:
            return ""
        limit = (
            CHEAP_PROOF_SECONDS if self._updates == 1 else CHEAP_PROOF_FRACTION * (time.perf_counter() - self._began)
        )
        return _before_step(state.steps) if self._all(state, self._seconds <= limit) else ""

    def _all(self, state: TrainState, good: bool) -> bool:
        """Returns whether `good` is true on every rank."""
        others = torch.tensor([0.0 if good else 1.0], dtype=torch.float64, device=state.mesh.device)
        all_reduce(others, state.mesh.world).wait()
        return not float(others)

    def _why_not(self, state: TrainState, batch: Batch | LocalBatch) -> str:
        """Returns why the proof before the first update is skipped, as a line for the user, or '' if it runs."""
        plan = state.plan
        whole = isinstance(batch, dict)
        rows = num_rows(batch) if isinstance(batch, dict) else sum(map(num_rows, batch.micro_batches)) * plan.dp
        count = rows // max(plan.rows_per_round, 1) if whole else len(batch.micro_batches)  # type: ignore[union-attr]
        if is_one_device(plan) and count <= 1 and not state.engine.recipe.products:
            return Message("one device with the batch as one micro-batch: nothing to prove")
        if self.mode != "auto":
            return ""
        if self.predicted.seconds:
            return self._too_dear(self.predicted.seconds, self.predicted.step, state)
        elements = sum(shape.numel() for shape in state.engine.shapes.values())
        example = batch if isinstance(batch, dict) else batch.micro_batches[0]
        places = max(
            (
                math.prod(value.shape[1:2])
                for value in example.values()
                if isinstance(value, torch.Tensor) and value.ndim
            ),
            default=1,
        )
        proven = min(rows, comparison_rows(plan, state.engine.batch_loss))
        backend, low = backend_of(state.mesh.device), state.engine.recipe.size < 4
        step = 6 * elements * rows * places / plan.world / backend.nominal_flops
        length = places = max(gather_objects(places))
        truncates = all(gather_objects(sequence_length(example) > 0))

        def seconds(length: int) -> float:
            work = 2 * 8 * elements * proven * length  # FLOPs: 2 batches, 8 per parameter and token with recompute
            return work / backend.nominal_fp32_flops + low * work / backend.nominal_flops

        while truncates and not is_proof_cheap(seconds(length), step) and (half := half_sequence_length(plan, length)):
            length = half
        self.longest = length if length < places else 0
        return self._too_dear(seconds(length), step, state)

    def _too_dear(self, seconds: float, step: float, state: TrainState) -> str:
        """Returns why mode 'auto' skips a proof that takes `seconds`, or '' if the proof is cheap. `step`: the seconds
        of a training step. All ranks call it."""
        if self._all(state, is_proof_cheap(seconds, step)):
            return ""
        return Message(
            "the plan is not proven on these ranks: a proof would take about {seconds}, more than "
            "{cheap_proof_fraction:.0%} of the first {cheap_proof_steps:,} steps; --prove runs it all the same "
            "(prove='start' in Python), `meshwright verify` proves a small model of this kind",
            seconds=show_seconds(seconds),
            cheap_proof_fraction=CHEAP_PROOF_FRACTION,
            cheap_proof_steps=CHEAP_PROOF_STEPS,
        )


def _before_step(done: int) -> str:
    """Returns the reason of a proof before the step that follows `done` completed steps of the run."""
    return Message("before step {step}", step=done + 1)


def _announcement(when: str, predicted: ProofCost) -> str:
    """Returns the line before a long proof. `when`: such as "before step 1"."""
    seconds, longer = show_seconds(predicted.seconds), show_seconds(predicted.seconds + predicted.rounding)
    if predicted.rounding:
        return Message(
            "proving the plan {when}, for about {seconds}, or {longer} if rounding has to be measured",
            when=when,
            seconds=seconds,
            longer=longer,
        )
    return Message("proving the plan {when}, for about {seconds}", when=when, seconds=seconds)


def _passed_line(proof: ProofResult, when: str, predicted: float) -> str:
    """Returns the line about a passed proof for the user. `when`: such as "before step 1". `predicted`: the planner's
    estimate of the proof in seconds, or 0."""
    seconds = show_seconds(proof.seconds)
    if predicted:
        seconds = Message("{seconds}, {predicted} predicted", seconds=seconds, predicted=show_seconds(predicted))
    line = Message(
        "proven equal to one device {when}: loss {loss:.1e}, gradients {gradient:.1e}, {parameters} parameter tensors, "
        "{rows} rows in {batches} batches ({seconds})",
        when=when,
        loss=proof.loss,
        gradient=proof.gradient,
        parameters=proof.parameters,
        rows=proof.rows,
        batches=len(proof.contents),
        seconds=seconds,
    )
    return Message("{lines}", lines=(line, *proof.notes))


def is_one_device(plan: Plan) -> bool:
    """Returns whether a plan uses one device and no feature (recompute, compile, ZeRO, offload, loss in chunks) that
    changes the computation of plain torch."""
    return (
        plan.world == 1
        and plan.recompute == Recompute.none
        and not (plan.compile or plan.zero or plan.offload or plan.loss_chunks > 1)
    )


def run_preflight(state: TrainState, batch: Batch | LocalBatch) -> None:
    """Runs the preflight checks, whose errors are more specific than those of the proof that follows."""
    batches, _ = StepPasses().split(state, batch)
    state.engine.zero.abort_step()
    state.engine.preflight.check(state.engine, batches, True)


def weight_versions(engine: Engine) -> list[int]:
    """Returns torch's version counter of each main weight of this rank. In-place writes increase the counter."""
    return [part._version for unit in engine.zero.units for part in unit.optim_shard.parts]


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
