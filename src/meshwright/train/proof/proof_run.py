"""A proof run: it computes the loss and every gradient of a small batch twice, under the plan and as on one device.

Rule: both sides run in training mode, with equal weights and equal batches. The plan's side is the trainer's own
forward and backward pass. One device's side runs on rank 0, which fetches the weights block by block
(reference_side.py). A proof compares the loss, the gradient of every parameter, the number of labels, and the set of
parameters that the loss reaches.

Guarantees: weights, optimizer states, buffers, random states and counters do not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from meshwright.analysis.model_copy import ModelCopy
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.runtime.loss.objective import Batch, num_rows
from meshwright.runtime.preflight.numeric_probes import perturb_constants
from meshwright.spec.proof import ProofResult
from meshwright.train.proof.isolated_pass import preserve_engine
from meshwright.train.proof.output_digests import OutputDigests, first_differing_module
from meshwright.train.proof.proof_batches import ProofBatch, build_proof_batches
from meshwright.train.proof.proof_tolerance import (
    LOW_PRECISION_FLOORS,
    STRICT_TOLERANCES,
    ProofComparison,
    ProofLimits,
    ProofOutcome,
    judge_comparison,
)
from meshwright.train.proof.reference_run import ReferenceOptions, StreamingLevel
from meshwright.train.proof.reference_side import ReferenceSide
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.state import TrainState

RANDOMNESS_TOLERANCE = 1e-9
"""If two losses of one device on the same batch differ by more than this (relative), the model uses random numbers."""
NOTHING_PROVEN_TEXT = mark_msgid("plan {plan}: the proof run proves nothing with this batch: {note}: use another batch")
ONE_DEVICE_FAILED_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot compute one device's side ({problem}): train without it with prove='never'"
)
NO_GRADIENTS_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot compute one device's gradients ({problem}): train without it with prove='never'"
)


def no_gradients(plan: str, problem: str) -> InputError:
    """Returns the error for a failed backward pass on one device."""
    return InputError(Message(NO_GRADIENTS_TEXT, plan=plan, problem=problem))


class NothingProven(InputError):
    """The batch cannot prove anything. Every rank raises this error, and training continues."""


class ProofRun:
    """One proof. All ranks construct it and call `prove`. The decision of rank 0 is the result on all ranks."""

    def __init__(
        self, state: TrainState, skeleton: ModelCopy, expected: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """`expected`: fingerprints of the weights that have not changed since the model was passed to `parallelize`."""
        self.state, self.engine = state, state.engine
        self.side = ReferenceSide(state.engine, skeleton, expected)
        self.compared: list[Batch] = []
        """The compared batches, and the untruncated versions of truncated ones. The sizes of all of them count as
        proven."""

    def prove(self, batch: Batch | LocalBatch, longest: int = 0) -> ProofResult:
        """Runs the proof on `batch`. All ranks call it. `longest`: the largest number of tokens per row, 0 for no
        limit. Raises NothingProven."""
        began = time.perf_counter()
        state, own_loss = self.state, self.side.skeleton.loss is not None
        contents = build_proof_batches(self.engine, batch, own_loss, longest)
        found: list[tuple[ProofComparison, ProofOutcome]] = []
        first, done = "", []
        with perturb_constants(self.engine) as constants:
            self.side.ignore_fingerprints(constants)
            for content in contents:
                one = self._content(content)
                if one is None:
                    continue
                found.append(one)
                self.compared += [each for each in (content.batch, content.uncut) if each is not None]
                done.append(content.title + ("" if self.side.trains else " (in eval mode)"))
                if not self._is_good(one):
                    first = self._located(content, one)
                    break
        if not found:
            raise NothingProven(Message(NOTHING_PROVEN_TEXT, plan=state.plan.name, note=self.side.notes[-1]))
        proof = self._proof(found, first) if self.side.is_rank_0 else None
        said = proof.model_dump() if proof is not None else {}
        said |= {
            "seconds": time.perf_counter() - began,
            "bytes": self.side.tensors.bytes,
            "contents": tuple(done),
            "notes": tuple(dict.fromkeys(self.side.notes)),
            "rows": sum(num_rows(content.batch) for content in contents[: len(done)]),
            "step": state.steps,
        }
        return ProofResult(**self.side.shared(said))

    # --- one batch --------------------------------------------------------------------------------

    def _content(self, content: ProofBatch) -> tuple[ProofComparison, ProofOutcome] | None:
        """Compares one batch. If the batch is optional and one device cannot run it, it adds a note and returns
        None."""
        low = self.side.is_low
        reference, (loss, labels, problem) = self.side.forward(content, self.side.options())
        if problem:
            if content.optional:
                self.side.notes.append(f"{content.title}: not proven, one device does not run it ({problem})")
                return None
            raise InputError(Message(ONE_DEVICE_FAILED_TEXT, plan=self.state.plan.name, problem=problem))
        planned, planned_labels, scale, reached = self._planned(content.batch)
        compared = ProofComparison((loss, planned), (labels, planned_labels), planned=reached)
        sketches: dict[str, torch.Tensor] = {}
        if problem := self.side.backward(reference, compared, scale, sketches if low else None):
            return self._without_streaming(content, problem)
        if not self.side.agreed(all(map(math.isfinite, (loss, *(gap.norm for gap in compared.gaps.values()))))):
            self.side.notes.append(f"{content.title}: not proven, one device's loss or gradients are not finite")
            return None
        limits = ProofLimits(
            *(LOW_PRECISION_FLOORS if low else STRICT_TOLERANCES)[self.side.compute],
            eps=torch.finfo(torch.float32 if low else self.side.compute).eps,
        )
        del reference
        verdict = judge_comparison(compared, limits)
        if low or not self.side.agreed(verdict.good):
            self._measure(content, compared, sketches, scale)
            verdict = judge_comparison(compared, limits)
        if not self.side.agreed(verdict.good) and self._draws(content, loss):
            return self._content(content)
        return compared, verdict

    def _without_streaming(self, content: ProofBatch, problem: str) -> tuple[ProofComparison, ProofOutcome] | None:
        """Repeats the comparison with all weights stored whole on rank 0. It is called after one device's backward with
        streamed weights has failed. Raises InputError if the repetition fails too."""
        if not self.side.streamed:
            raise no_gradients(self.state.plan.name, problem)
        self.side.stream_less(StreamingLevel.NOTHING, "the backward does not run a block at a time")
        return self._content(content)

    def _measure(
        self, content: ProofBatch, compared: ProofComparison, sketches: dict[str, torch.Tensor], scale: float
    ) -> None:
        """Measures two differences and stores them in `compared`: the plan's gradients against one device in the next
        higher precision, and one device's rounding in the plan's own precision. `sketches`: sketches of the gradients
        in the higher precision; they are filled here if empty."""
        if not sketches and not self.side.is_low:
            high, (loss, _, problem) = self.side.forward(
                content, ReferenceOptions(torch.float64, high=True, streamed=self.side.streamed)
            )
            if problem:
                self.side.notes.append(f"{content.title}: rounding was not measured ({problem})")
                return
            compared.losses = (loss, compared.losses[1])
            if problem := self.side.backward(high, compared, scale, sketches):
                raise no_gradients(self.state.plan.name, problem)
            del high
        low, (loss, _, problem) = self.side.forward(
            content, ReferenceOptions(self.side.compute, streamed=self.side.streamed)
        )
        if problem:
            self.side.notes.append(f"{content.title}: rounding was not measured ({problem})")
            return
        mine: dict[str, torch.Tensor] = {}
        if problem := self.side.backward(low, None, 1.0, mine):
            raise no_gradients(self.state.plan.name, problem)
        compared.rounded = abs(loss - compared.losses[0])
        for name, gap in compared.gaps.items():
            if name in mine:
                gap.noise = float((mine[name] - sketches[name]).norm())

    def _draws(self, content: ProofBatch, loss: float) -> bool:
        """Returns whether one device's loss depends on random numbers. If so, both sides use eval mode from now on."""
        if not self.side.trains:
            return False
        self.side.seed += 1
        reference, (again, _, _) = self.side.forward(content, self.side.options())
        if reference is not None:
            reference.close()
        if abs(again - loss) <= RANDOMNESS_TOLERANCE * abs(loss):
            return False
        self.side.trains = False
        self.side.notes.append("the model draws random numbers beside dropout: compared in eval mode")
        return True

    # --- the plan's side --------------------------------------------------------------------------

    def _planned(self, batch: Batch) -> tuple[float, int, float, set[str]]:
        """Runs the plan's side. Returns loss, labels, loss scale, and reached parameters. The gradients remain in the
        engine's flat buffers."""
        state, zero = self.state, self.engine.zero
        factor = state.scale.factor
        try:
            while True:
                with self.side.isolated(), preserve_engine(self.engine):
                    loss, labels, squares = StepPasses().backward(state, dict(batch))
                    reached = set(zero.param_names) - set(zero.unused)
                if all(map(math.isfinite, squares)) or state.scale.factor <= 1.0:
                    return loss, labels, state.scale.factor, reached
                state.scale.factor /= 16.0  # in float16 the initial loss scale would overflow
        finally:
            state.scale.factor = factor

    # --- location of a difference -------------------------------------------------------------------

    def _located(self, content: ProofBatch, found: tuple[ProofComparison, ProofOutcome]) -> str:
        """Returns a description of the first difference: a misplaced weight, the first differing module, the loss, or
        the differing gradient nearest to the loss."""
        if misplaced := self.side.shared(self.side.misplaced):
            return f"first at {misplaced[0]}: the ranks have other values of it than the model had"
        ours, theirs = OutputDigests(), self.side.output_digests(content.batch)
        with self.side.isolated(), preserve_engine(self.engine), ours.of_plan(self.engine):
            StepPasses().backward(self.state, dict(content.batch))
        limit = (
            LOW_PRECISION_FLOORS[self.side.compute][1]
            if self.side.is_low
            else 100 * STRICT_TOLERANCES[self.side.compute][0]
        )
        named = first_differing_module(self.engine, self.side.shared(theirs.sums), ours, limit)
        _, verdict = found
        if not named and self.side.is_rank_0 and not verdict.loss <= verdict.loss_limit:
            named = "first at the loss: the outputs of all modules agree"
        elif not named and self.side.is_rank_0 and verdict.beyond:
            named = f"first in backward: gradient of {verdict.beyond[0]}"
        return self.side.shared(named)

    # --- result -------------------------------------------------------------------------

    def _is_good(self, found: tuple[ProofComparison, ProofOutcome]) -> bool:
        compared, verdict = found
        return self.side.agreed(
            not self.side.misplaced
            and verdict.good
            and compared.labels[0] == compared.labels[1]
            and set(compared.reached) == compared.planned
        )

    def _proof(self, found: list[tuple[ProofComparison, ProofOutcome]], first: str) -> ProofResult:
        """Returns the proof result: the largest differences over all batches, and all other values from the last batch.
        Comparison stops at a differing batch, so such a batch is the last."""
        compared, verdict = found[-1]
        worst = max((each for _, each in found), key=lambda each: each.gradient / max(each.gradient_limit, 1e-300))
        worst = worst if verdict.good else verdict
        reached = set(compared.reached)
        order = list(self.engine.shapes)
        good = (
            not self.side.misplaced
            and verdict.good
            and compared.labels[0] == compared.labels[1]
            and reached == compared.planned
        )
        return ProofResult(
            plan=self.state.plan.name,
            precision=self.engine.recipe.name,
            equal=good,
            step=self.state.steps,
            loss=max(each.loss for _, each in found),
            losses=compared.losses,
            gradient=worst.gradient,
            where=worst.where,
            tolerance=(verdict.loss_limit, worst.gradient_limit),
            parameters=len(compared.gaps),
            rounding=verdict.rounding,
            labels=compared.labels,
            missing=tuple(name for name in order if name in reached - compared.planned),
            extra=tuple(name for name in order if name in compared.planned - reached),
            first=first,
        )
