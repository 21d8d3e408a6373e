"""Proves that a plan computes what one device computes: computes the loss and every gradient of a small batch twice,
under the plan and as on one device. The schedule of proofs (proof_schedule.py) calls it.

Two computations run in training mode, with equal weights and batches. One is the trainer's own forward and backward
under the plan. The other is the reference: it runs on rank 0, which fetches the weights block by block from the other
ranks (reference_run.py). A proof compares the loss, the gradient of every parameter, the number of valid labels, and
the set of parameters that get a gradient.

Guarantees: weights, optimizer states, buffers, random states and counters do not change.
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
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait, is_out_of_memory
from meshwright.runtime.gather_service import ElementRange, GatherService
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.numeric_probes import perturb_constants
from meshwright.spec.record import ProofResult
from meshwright.train.proof.proof_batches import ProofBatch, build_proof_batches, sequence_length
from meshwright.train.proof.proof_tolerance import (
    LOW_PRECISION_FLOORS,
    STRICT_TOLERANCES,
    GradientGap,
    ProofComparison,
    ProofOutcome,
    judge_comparison,
    limits_of,
    sketch_gradient,
)
from meshwright.train.proof.recorded_pass import OutputDigests, first_differing_module, isolate_pass, preserve_engine
from meshwright.train.proof.reference_run import ReferenceOptions, ReferenceRun, StreamingLevel
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.state import TrainState

WHOLE = "{}: rank 0 stored all weights for the comparison with one device"
"""The note of a proof whose reference stored all weights on rank 0. The reason fills the braces."""


class ReferenceSide:
    """Computes the reference of a proof on rank 0. All ranks construct it and call its methods; the ranks other than 0
    serve the requests of rank 0 for weights. `trains`: whether plan and reference run in training mode. `seed`: the
    random seed of both."""

    def __init__(self, engine: Engine, skeleton: ModelCopy, expected: Mapping[str, torch.Tensor] | None) -> None:
        """`skeleton`: the copy of the unsharded model. `expected`: the fingerprints of its weights, by name, if the
        weights have not changed since `parallelize`."""
        self.engine, self.skeleton = engine, skeleton
        self.compute = getattr(torch, engine.recipe.compute)
        self.tensors = GatherService(engine, self.compute)
        self.is_rank_0 = engine.mesh.rank == 0
        self.trains, self.seed = True, 1
        self.expected = dict(expected or {})
        self.misplaced: list[str] = []
        """The names of weights whose values on the ranks differ from those of the original model."""
        self.notes: list[str] = []
        self.runs: list[ReferenceRun] = []
        """The runs of rank 0."""
        self.streamed = StreamingLevel.ROWS
        # The recompute of a streamed block would repeat the block's writes to buffers.
        if any(gather_objects(bool(engine.preflight.written))):
            self.stream_less(StreamingLevel.NOTHING, "the model writes to its weights in its forward")

    @property
    def is_low(self) -> bool:
        """Returns whether the plan computes in a precision below float32."""
        return self.compute in LOW_PRECISION_FLOORS

    def options(self, high: bool) -> ReferenceOptions:
        """Returns the options of a reference in the plan's own precision, or, if `high`, in the next higher one."""
        higher = torch.float32 if self.is_low else torch.float64
        return ReferenceOptions(higher if high else self.compute, high=high, streamed=self.streamed)

    def isolated(self) -> AbstractContextManager[None]:
        """Returns a context that restores the model and the random states at its end (`isolate_pass`)."""
        return isolate_pass(self.engine, self.trains, self.seed)

    def stream_less(self, level: StreamingLevel, reason: str) -> None:
        """Lowers the streaming level to `level`: from now on rank 0 stores more weights. If it stores all weights, a
        note with the reason is added."""
        self.streamed = level
        if not level:
            self.notes.append(WHOLE.format(reason))

    def ignore_fingerprints(self, names: Collection[str]) -> None:
        """Drops the fingerprints of the weights `names`, which the proof changes temporarily."""
        self.expected = {name: value for name, value in self.expected.items() if name not in names}

    def forward(
        self, content: ProofBatch, options: ReferenceOptions
    ) -> tuple[ReferenceRun | None, tuple[float, int, str]]:
        """Runs the reference forward. Returns the run (None except on rank 0), and on every rank a tuple: the mean
        loss, the number of valid labels, and an error text or ''. If the run fails or its loss is NaN, it may have read
        weights that rank 0 does not store ([Note: absent weights] in reference_run.py). The run is then repeated at a
        lower streaming level, if there is one."""
        reference: ReferenceRun | None = None

        def run() -> tuple[float, int, str]:
            nonlocal reference
            reference = self._make(options)
            reference.expected, self.expected = self.expected, {}
            found = reference.forward(content.batch, 1.0)
            self.misplaced += reference.misplaced
            return (*found, "absent" if reference.is_absent else "")

        with self.isolated():
            loss, labels, problem = self._on_rank_0(run)
        if (problem or math.isnan(loss)) and options.streamed:
            self.close()
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
        """Runs the reference backward. Returns why it failed, or ''.

        With `compared`, rank 0 requests the plan's gradients, which have the factor `scale`, and stores the differences
        in `compared`. With `sketches`, it stores sketches of the reference gradients there, by parameter name.
        """

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
        """Runs the reference forward and returns the digests of its module outputs. They are empty except on rank
        0."""
        found = OutputDigests()

        def run() -> tuple[float, int, str]:
            reference = self._make(self.options(self.is_low))
            with found.of(reference.model):
                reference.forward(batch, 1.0)
            return 0.0, 0, ""

        with self.isolated():
            self._on_rank_0(run)
        self.close()
        return found

    def _make(self, options: ReferenceOptions) -> ReferenceRun:
        reference = ReferenceRun(self.skeleton, self.engine, self.tensors, options)
        self.runs.append(reference)
        self._set_modes(reference.model)
        return reference

    def close(self) -> None:
        """Frees the memory of all runs. Python's garbage collection does not see the references of autograd's graph, so
        a run that has failed would stay in memory with its engine."""
        while self.runs:
            self.runs.pop().close()

    def _set_modes(self, model: nn.Module) -> None:
        """Sets each module of the skeleton to the training mode of that module in the trained model. A module that is
        on another pipeline rank keeps its mode."""
        live = dict(self.engine.model.named_modules())
        for path, module in model.named_modules():
            if not self.trains:
                module.training = False
            elif path in live and type(live[path]) is type(module):
                module.training = live[path].training

    def _on_rank_0(self, run: Callable[[], tuple[float, int, str]]) -> tuple[float, int, str]:
        """Runs `run` on rank 0 while the other ranks serve its requests. Returns its result on every rank: loss, number
        of labels, and an error text or ''. An exception of `run` becomes an error text, or ReferenceTooLarge on every
        rank if rank 0 has run out of memory."""
        found, is_too_large = (0.0, 0, ""), False
        if not self.is_rank_0:
            self.tensors.serve()
        else:
            try:
                found = run()
            except Exception as error:
                found, is_too_large = (math.nan, 0, reason_of(error)), is_out_of_memory(error)
            finally:
                self.tensors.end()
        malloc_trim()
        (loss, labels, problem), is_too_large = self.shared((found, is_too_large))
        if is_too_large:
            raise ReferenceTooLarge(problem)
        return loss, labels, problem

    def agreed(self, good: bool) -> bool:
        """Broadcasts rank 0's `good` to all ranks and returns it."""
        return bool(self.shared(good))

    def shared(self, value: Any) -> Any:
        """Broadcasts rank 0's `value` to all ranks and returns it."""
        if self.engine.mesh.world is None:
            return value
        box = [value if self.is_rank_0 else None]
        with interruptible_wait():
            dist.broadcast_object_list(box, 0)
        return box[0]


RANDOMNESS_TOLERANCE = 1e-9
"""If two reference losses with different seeds differ by more than this fraction, the model uses random numbers."""
NOTHING_PROVEN_TEXT = mark_msgid(
    "plan {plan}: this batch cannot be compared with one device ({note}): use another batch"
)
ONE_DEVICE_FAILED_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot run the model on one device ({problem}): train without it with prove='never'"
)
NO_GRADIENTS_TEXT = mark_msgid(
    "plan {plan}: the proof run cannot compute the gradients of one device ({problem}): train without it with "
    "prove='never'"
)


def no_gradients(plan: str, problem: str) -> InputError:
    """Returns the error for a failed reference backward. `problem`: the error text of that backward."""
    return InputError(Message(NO_GRADIENTS_TEXT, plan=plan, problem=problem))


class NothingProven(InputError):
    """Raised on every rank if no comparison is possible with this batch. Training continues."""


class ReferenceTooLarge(InputError):
    """Raised on every rank if rank 0 has too little memory for the reference. A proof of shorter rows needs less."""


class ProofRun:
    """One proof. All ranks construct it and call `prove`. Rank 0 judges, and all ranks return its result."""

    def __init__(
        self, state: TrainState, skeleton: ModelCopy, expected: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """`skeleton` and `expected`: as for `ReferenceSide`."""
        self.state, self.engine = state, state.engine
        self.side = ReferenceSide(state.engine, skeleton, expected)
        self.measures_rounding = False
        """Whether rounding was measured for a batch."""
        self.compared: list[Batch] = []
        """The compared batches. For a truncated batch, also the batch before truncation: the sizes of both count as
        proven."""
        self.length = 0
        """The number of tokens of each row of the first batch, or 0 if its rows are not sequences."""

    def prove(self, batch: Batch | LocalBatch, longest: int = 0) -> ProofResult:
        """Runs the proof on batches that it derives from `batch` (proof_batches.py). All ranks call it. `longest`: the
        maximum number of tokens per row, or 0 for no limit. Raises NothingProven if no batch can be compared,
        ReferenceTooLarge if rank 0 has too little memory, and InputError if the model cannot be run on one device."""
        began = time.perf_counter()
        try:
            return self._prove(batch, longest, began)
        finally:
            self.side.close()

    def _prove(self, batch: Batch | LocalBatch, longest: int, began: float) -> ProofResult:
        state, own_loss = self.state, self.side.skeleton.loss is not None
        contents = build_proof_batches(self.engine, batch, own_loss, longest)
        self.length = sequence_length(contents[0].batch)
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
        """Compares one batch. Returns None and adds a note in two cases: the loss or gradients of the reference are not
        finite, or the batch is optional and the reference cannot run its forward. Raises InputError if the reference
        cannot run the forward of a batch that is not optional, or the backward of any batch."""
        low, limits = self.side.is_low, limits_of(self.side.engine.recipe)
        reference, (loss, labels, problem) = self.side.forward(content, self.side.options(self.side.is_low))
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
        del reference
        verdict = judge_comparison(compared, limits)
        if low or not self.side.agreed(verdict.good):
            self._measure(content, compared, sketches, scale)
            verdict = judge_comparison(compared, limits)
        if not self.side.agreed(verdict.good) and self._draws(content, loss):
            return self._content(content)
        return compared, verdict

    def _without_streaming(self, content: ProofBatch, problem: str) -> tuple[ProofComparison, ProofOutcome] | None:
        """Repeats the comparison without streaming, after the reference backward has failed with `problem`. Raises
        InputError if it has failed without streaming too."""
        if not self.side.streamed:
            raise no_gradients(self.state.plan.name, problem)
        self.side.stream_less(StreamingLevel.NOTHING, "the backward does not run a block at a time")
        return self._content(content)

    def _measure(
        self, content: ProofBatch, compared: ProofComparison, sketches: dict[str, torch.Tensor], scale: float
    ) -> None:
        """Measures the rounding ([Note: tolerance] in proof_tolerance.py) and stores it in `compared`.

        It compares the plan with a reference in the next higher precision, unless `compared` is already such a
        comparison. Then it runs the reference in the plan's own precision and estimates its rounding error. `sketches`:
        sketches of the gradients in the higher precision, filled here if this function makes that comparison.
        """
        self.measures_rounding = True
        if not self.side.is_low:
            high, (loss, _, problem) = self.side.forward(content, self.side.options(True))
            if problem:
                self.side.notes.append(f"{content.title}: rounding was not measured ({problem})")
                return
            compared.losses = (loss, compared.losses[1])
            if problem := self.side.backward(high, compared, scale, sketches):
                raise no_gradients(self.state.plan.name, problem)
            del high
        low, (loss, _, problem) = self.side.forward(content, self.side.options(False))
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
        """Returns whether the reference loss depends on random numbers. `loss`: the reference loss with the previous
        seed. If it does, plan and reference use eval mode from now on."""
        if not self.side.trains:
            return False
        self.side.seed += 1
        _, (again, _, _) = self.side.forward(content, self.side.options(self.side.is_low))
        self.side.close()
        if abs(again - loss) <= RANDOMNESS_TOLERANCE * abs(loss):
            return False
        self.side.trains = False
        self.side.notes.append("the model uses random numbers other than dropout, so the proof compares in eval mode")
        return True

    # --- under the plan ---------------------------------------------------------------------------

    def _planned(self, batch: Batch) -> tuple[float, int, float, set[str]]:
        """Runs forward and backward under the plan. Returns the mean loss, the number of valid labels, the loss scale
        and the parameters that got a gradient. The gradients remain in the engine's flat buffers."""
        state, zero = self.state, self.engine.zero
        factor = state.scale.factor
        try:
            while True:
                with self.side.isolated(), preserve_engine(self.engine):
                    loss, labels, squares = StepPasses().backward(state, dict(batch))
                    reached = set(zero.param_names) - set(zero.unused)
                if all(map(math.isfinite, squares)) or state.scale.factor <= 1.0:
                    return loss, labels, state.scale.factor, reached
                state.scale.factor /= 16.0  # the initial loss scale of float16 may overflow
        finally:
            state.scale.factor = factor

    # --- location of a difference -------------------------------------------------------------------

    def _located(self, content: ProofBatch, found: tuple[ProofComparison, ProofOutcome]) -> str:
        """Returns a description of the first difference: a weight with wrong values, the first module whose output
        differs, the loss, or the differing gradient that is nearest to the loss."""
        if misplaced := self.side.shared(self.side.misplaced):
            return f"first at {misplaced[0]}: its values on the ranks differ from those before sharding"
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
        """Returns the proof result. If a batch differs from one device, the comparison has stopped there, so only the
        last batch can differ.
        - The loss difference is the largest over all batches.
        - The gradient difference, with its parameter and limit, is from the last batch if that differs. Otherwise it is
          from the batch where it is largest in relation to its limit.
        - All other values are from the last batch."""
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
