"""A proof run: it computes the loss and every gradient of a small batch twice, under the plan and as on one device.

Rule: both sides run in training mode, with equal weights and equal batches. The plan's side is the trainer's own
forward and backward pass. One device's side runs on rank 0, which fetches the weights block by block (proof_run.py). A
proof compares the loss, the gradient of every parameter, the number of labels, and the set of parameters that the loss
reaches.

Guarantees: weights, optimizer states, buffers, random states and counters do not change.

`ReferenceSide` is one device's side of a proof: rank 0 computes it, and the other ranks serve its requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.model_copy import ModelCopy
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.printable_text import reason_of
from meshwright.runtime.backend import malloc_trim
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait
from meshwright.runtime.gather_service import ElementRange, GatherService
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.numeric_probes import perturb_constants
from meshwright.spec.record import ProofResult
from meshwright.train.proof.proof_batches import ProofBatch, build_proof_batches
from meshwright.train.proof.proof_tolerance import (
    LOW_PRECISION_FLOORS,
    STRICT_TOLERANCES,
    GradientGap,
    ProofComparison,
    ProofLimits,
    ProofOutcome,
    judge_comparison,
    sketch_gradient,
)
from meshwright.train.proof.recorded_pass import OutputDigests, first_differing_module, isolate_pass, preserve_engine
from meshwright.train.proof.reference_run import ReferenceOptions, ReferenceRun, StreamingLevel
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.state import TrainState

WHOLE = "{}: one device's side stored all weights"
"""The note of a proof for which all weights were stored whole on rank 0."""


class ReferenceSide:
    """One device's side of a proof. All ranks construct it and call its methods. `trains`: both sides run in training
    mode. `seed`: the seed of the random numbers of both sides."""

    def __init__(self, engine: Engine, skeleton: ModelCopy, expected: Mapping[str, torch.Tensor] | None) -> None:
        """`expected`: fingerprints of the weights that have not changed since the model was passed to `parallelize`."""
        self.engine, self.skeleton = engine, skeleton
        self.compute = getattr(torch, engine.recipe.compute)
        self.tensors = GatherService(engine, self.compute)
        self.is_rank_0 = engine.mesh.rank == 0
        self.trains, self.seed = True, 1
        self.expected = dict(expected or {})
        self.misplaced: list[str] = []
        """Names of weights whose values on the ranks differ from those of the original model."""
        self.notes: list[str] = []
        self.streamed = StreamingLevel.ROWS
        # a recompute of a block would repeat its writes to buffers
        if any(gather_objects(bool(engine.preflight.written))):
            self.stream_less(StreamingLevel.NOTHING, "the model writes to its weights in its forward")

    @property
    def is_low(self) -> bool:
        """Returns whether the plan computes in a precision below float32. If so, one device computes in float32."""
        return self.compute in LOW_PRECISION_FLOORS

    def options(self) -> ReferenceOptions:
        """Returns the options of the reference run that the plan is compared with."""
        return ReferenceOptions(
            torch.float32 if self.is_low else self.compute, high=self.is_low, streamed=self.streamed
        )

    def isolated(self) -> AbstractContextManager[None]:
        """Restores the engine and the random states after a pass of either side."""
        return isolate_pass(self.engine, self.trains, self.seed)

    def stream_less(self, level: StreamingLevel, reason: str) -> None:
        """Stores more weights whole on rank 0 from now on. If all weights are stored whole, it adds a note with the
        reason."""
        self.streamed = level
        if not level:
            self.notes.append(WHOLE.format(reason))

    def ignore_fingerprints(self, names: Collection[str]) -> None:
        """Ignores the fingerprints of these weights, since the proof changes the weights."""
        self.expected = {name: value for name, value in self.expected.items() if name not in names}

    def forward(
        self, content: ProofBatch, options: ReferenceOptions
    ) -> tuple[ReferenceRun | None, tuple[float, int, str]]:
        """Runs one device's forward. Returns the run (None except on rank 0), and on every rank its mean loss, its
        number of labels and an error text. If a run with streamed weights has read absent weights, it runs again with
        more weights stored whole."""
        reference: ReferenceRun | None = None

        def run() -> tuple[float, int, str]:
            nonlocal reference
            reference = ReferenceRun(self.skeleton, self.engine, self.tensors, options)
            self._set_modes(reference.model)
            reference.expected, self.expected = self.expected, {}
            found = reference.forward(content.batch, 1.0)
            self.misplaced += reference.misplaced
            return (*found, "absent" if reference.is_absent else "")

        with self.isolated():
            loss, labels, problem = self._on_rank_0(run)
        if (problem or math.isnan(loss)) and options.streamed:
            self.stream_less(
                StreamingLevel(options.streamed - 1), "weights of blocks are read outside of their forward"
            )
            return self.forward(content, replace(options, streamed=self.streamed))
        return reference, (loss, labels, problem)

    def backward(
        self,
        reference: ReferenceRun | None,
        compared: ProofComparison | None,
        scale: float,
        sketches: dict[str, torch.Tensor] | None,
    ) -> str:
        """Runs one device's backward. With `compared`, it requests the plan's gradients and stores the differences
        there. Returns why the backward failed, or ''."""

        def compare(where: ElementRange, one: torch.Tensor) -> Callable[[int, torch.Tensor], None] | None:
            name, first, flat = where.name, where.start, one.reshape(-1)
            if sketches is not None:
                sketches[name] = sketch_gradient(name, one, first) + (sketches[name] if first else 0)
            if compared is None:
                return None
            if not first:
                compared.gaps[name] = GradientGap(self.engine.shapes[name].numel())
            gap = compared.gaps[name]
            return lambda start, planned: gap.add(flat[start - first : start - first + len(planned)], planned, scale)

        def run() -> tuple[float, int, str]:
            assert reference is not None
            reference.backward(compare)
            if compared is not None:
                compared.reached = reference.reached
            return 0.0, 0, ""

        with self.isolated():
            return self._on_rank_0(run)[2]

    def output_digests(self, batch: Batch) -> OutputDigests:
        """Returns the digests of one device's module outputs; on ranks other than 0 they are empty."""
        found = OutputDigests()

        def run() -> tuple[float, int, str]:
            reference = ReferenceRun(self.skeleton, self.engine, self.tensors, self.options())
            self._set_modes(reference.model)
            with found.of(reference.model):
                reference.forward(batch, 1.0)
            reference.close()
            return 0.0, 0, ""

        with self.isolated():
            self._on_rank_0(run)
        return found

    def _set_modes(self, model: nn.Module) -> None:
        """Gives each module of the skeleton the training mode of its counterpart in the trainer's model. Modules that
        are on other pipeline stages keep their modes."""
        live = dict(self.engine.model.named_modules())
        for path, module in model.named_modules():
            if not self.trains:
                module.training = False
            elif path in live and type(live[path]) is type(module):
                module.training = live[path].training

    def _on_rank_0(self, run: Callable[[], tuple[float, int, str]]) -> tuple[float, int, str]:
        """Runs `run` on rank 0 while the other ranks serve its requests. Every rank returns the result, whose last item
        is an error text or ''."""
        found = (0.0, 0, "")
        if not self.is_rank_0:
            self.tensors.serve()
        else:
            try:
                found = run()
            except Exception as error:
                found = (math.nan, 0, reason_of(error))
            finally:
                self.tensors.end()
        malloc_trim()
        return self.shared(found)

    def agreed(self, good: bool) -> bool:
        """Returns rank 0's `good` on every rank."""
        return bool(self.shared(good))

    def shared(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        if self.engine.mesh.world is None:
            return value
        box = [value if self.is_rank_0 else None]
        with interruptible_wait():
            dist.broadcast_object_list(box, 0)
        return box[0]


RANDOMNESS_TOLERANCE = 1e-9
"""If two losses of one device on the same batch differ by more than this (relative), the model uses random numbers."""
NOTHING_PROVEN_TEXT = mark_msgid("plan {plan}: the proof run proves nothing with this batch: {note}: use another batch")
ONE_DEVICE_FAILED_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot run the model on one device ({problem}): train without it with prove='never'"
)
NO_GRADIENTS_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot compute the gradients of one device ({problem}): train without it with "
    "prove='never'"
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
