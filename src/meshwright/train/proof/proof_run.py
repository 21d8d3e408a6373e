"""The proof run: loss and every gradient of a small batch, under the plan on the real ranks and again as on one device.

Rule: both sides run in training mode, with the same weights and the same batch. The plan's side is the trainer's own
backward pass. One device's side streams through rank 0 (reference_run.py). It compares the loss, the gradient of every
parameter, the number of labels, and the set of parameters that the loss reaches.

Guarantees: weights, optimizer states, buffers, random states and counters do not change.

After a difference, it locates the first differing module without stored outputs: by sums over the outputs of each
module, added up over all ranks. A module's output is sharded by rows, positions or features, or replicated on several
ranks. The total number of elements over all ranks shows how often each is counted. So sums of outputs and of their
squares are comparable with one device's under any sharding. Outputs that are partial sums, or sharded otherwise, have
no integer ratio and are skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.model_copy import ModelCopy
from meshwright.core.errors import InputError
from meshwright.core.printable_text import reason_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait
from meshwright.runtime.gather_service import ElementRange, GatherService
from meshwright.runtime.host_heap import malloc_trim
from meshwright.runtime.layout.placeholder import StagePlaceholder
from meshwright.runtime.loss.objective import Batch, num_rows
from meshwright.runtime.preflight.numeric_probes import perturb_constants
from meshwright.spec.proof import ProofResult
from meshwright.train.proof.isolated_pass import isolate_pass, preserve_trainer
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
from meshwright.train.proof.reference_run import ReferenceOptions, ReferenceRun, StreamingLevel

if TYPE_CHECKING:
    from meshwright.train.trainer import LocalBatch, Trainer


class OutputDigests:
    """The digests of module outputs: `sums` has, in the order in which modules first end, the elements, their sum, and
    the sum of their squares."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float, float]] = {}
        self.records = True

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Adds the outputs of all modules of `model` inside, while `records` is set."""
        handles = [module.register_forward_hook(self._hook(path)) for path, module in model.named_modules() if path]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def of_plan(self, engine: Engine) -> Iterator[None]:
        """Adds the outputs of this rank's forward passes inside, without recomputes."""
        inner, pipeline = engine.pipeline.forward, engine.pipeline
        self.records = False

        def forward(*given: Any) -> Any:
            self.records = True
            try:
                return inner(*given)
            finally:
                self.records = False

        pipeline.forward = forward
        try:
            with self.of(engine.model):
                yield
        finally:
            pipeline.forward = inner

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            leaves = output if isinstance(output, tuple | list) else (output,)
            tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            if (
                not self.records
                or isinstance(module, StagePlaceholder)
                or tensor is None
                or not tensor.is_floating_point()
            ):
                return
            values = tensor.detach().double()
            elements, total, squares = self.sums.get(path, (0.0, 0.0, 0.0))
            self.sums[path] = (
                elements + values.numel(),
                total + float(values.sum()),
                squares + float(values.square().sum()),
            )

        return hook


def first_differing_module(
    engine: Engine, one: Mapping[str, tuple[float, float, float]], ours: OutputDigests, limit: float
) -> str:
    """Describes the first module whose output differs by more than `limit`, or returns ''. `one`: the sums of one
    device, on every rank."""
    rows = [ours.sums.get(path, (0.0, 0.0, 0.0)) for path in one]
    table = torch.tensor(rows, dtype=torch.float64, device=engine.mesh.device).view(-1)
    if table.numel():
        all_reduce(table, engine.mesh.world).wait()
    for (path, (elements, total, squares)), (count, ours_total, ours_squares) in zip(
        one.items(), table.view(-1, 3).tolist(), strict=True
    ):
        similarity = count / elements if elements else 0.0
        if similarity < 1 or similarity != int(similarity):
            continue
        size = math.sqrt(max(squares, 1e-300))
        off = max(
            abs(ours_squares / similarity - squares) / max(squares, 1e-300) / 2,
            abs(ours_total / similarity - total) / (size * math.sqrt(elements)),
        )
        if not off <= limit:
            return f"first at {path}: its output by {off:.2g}"
    return ""


WHOLE = "{}: one device's side stored all weights"
"""The note of a proof in which nothing was streamed."""
RANDOMNESS_TOLERANCE = 1e-9
"""The relative difference of two losses of one device above which the model draws random numbers."""


def no_gradients(plan: str, problem: str) -> InputError:
    """Returns the error for a backward of one device that does not run."""
    return InputError(
        f"plan {plan}: the proof run cannot compute one device's gradients ({problem}): train without it with "
        "prove='never'"
    )


class NothingProven(InputError):
    """The batch proves nothing. Every rank raises it, and training goes on as one device would."""


class ProofRun:
    """One proof. All ranks make it and call `prove`. Rank 0 decides the result of all ranks."""

    def __init__(
        self, trainer: Trainer, skeleton: ModelCopy, expected: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """`expected`: fingerprints of the model's weights, if they have not changed since the model was given."""
        self.trainer, self.engine, self.skeleton = trainer, trainer.engine, skeleton
        self.compute = getattr(torch, trainer.engine.recipe.compute)
        self.tensors = GatherService(trainer.engine, self.compute)
        self.is_first = trainer.mesh.rank == 0
        self.trains, self.seed = True, 1
        self.expected = dict(expected or {})
        self.misplaced: list[str] = []
        self.compared: list[Batch] = []
        """The compared batches, plus the uncut versions of shortened ones, whose length counts as known."""
        self.notes: list[str] = []
        self.streamed = StreamingLevel.ROWS
        if any(gather_objects(bool(self.engine.preflight.written))):  # a recompute of a block would write once more
            self.streamed = StreamingLevel.NOTHING
            self.notes.append(WHOLE.format("the model writes to its weights in its forward"))

    def prove(self, batch: Batch | LocalBatch, longest: int = 0) -> ProofResult:
        """Runs the proof on `batch`. All ranks call it. `longest`: the largest number of tokens per row, 0 for all.
        Raises NothingProven."""
        began = time.perf_counter()
        trainer, contents = (
            self.trainer,
            build_proof_batches(self.engine, batch, self.skeleton.loss is not None, longest),
        )
        found: list[tuple[ProofComparison, ProofOutcome]] = []
        first, done = "", []
        with perturb_constants(self.engine) as constants:
            self.expected = {name: value for name, value in self.expected.items() if name not in constants}
            for content in contents:
                one = self._content(content)
                if one is None:
                    continue
                found.append(one)
                self.compared += [each for each in (content.batch, content.uncut) if each is not None]
                done.append(content.title + ("" if self.trains else " (in eval mode)"))
                if not self._is_good(one):
                    first = self._located(content, one)
                    break
        if not found:
            raise NothingProven(
                f"plan {trainer.plan.name}: the proof run proves nothing with this batch: {self.notes[-1]}: use "
                "another batch"
            )
        proof = self._proof(found, first) if self.is_first else None
        said = proof.model_dump() if proof is not None else {}
        said |= {
            "seconds": time.perf_counter() - began,
            "bytes": self.tensors.bytes,
            "contents": tuple(done),
            "notes": tuple(dict.fromkeys(self.notes)),
            "rows": sum(num_rows(content.batch) for content in contents[: len(done)]),
            "step": trainer.steps,
        }
        return ProofResult(**self._shared(said))

    # --- one batch --------------------------------------------------------------------------------

    def _content(self, content: ProofBatch) -> tuple[ProofComparison, ProofOutcome] | None:
        """Compares one batch. Returns None where one device cannot run it, which is then noted."""
        side, low = self._side(), self.compute in LOW_PRECISION_FLOORS
        reference, (loss, labels, problem) = self._forward(content, side)
        if problem:
            if content.optional:
                self.notes.append(f"{content.title}: not proven, one device does not run it ({problem})")
                return None
            raise InputError(
                f"plan {self.trainer.plan.name}: the proof run cannot compute one device's side ({problem}): train "
                "without it with prove='never'"
            )
        planned, planned_labels, scale, reached = self._planned(content.batch)
        compared = ProofComparison((loss, planned), (labels, planned_labels), planned=reached)
        sketches: dict[str, torch.Tensor] = {}
        if problem := self._backward(reference, compared, scale, sketches if low else None):
            return self._without_streaming(content, problem)
        if not self._agreed(all(map(math.isfinite, (loss, *(gap.norm for gap in compared.gaps.values()))))):
            self.notes.append(f"{content.title}: not proven, one device's loss or gradients are not finite")
            return None
        limits = ProofLimits(
            *(LOW_PRECISION_FLOORS if low else STRICT_TOLERANCES)[self.compute],
            eps=torch.finfo(torch.float32 if low else self.compute).eps,
        )
        del reference
        verdict = judge_comparison(compared, limits)
        if low or not self._agreed(verdict.good):
            self._measure(content, compared, sketches, scale)
            verdict = judge_comparison(compared, limits)
        if not self._agreed(verdict.good) and self._draws(content, loss):
            return self._content(content)
        return compared, verdict

    def _without_streaming(self, content: ProofBatch, problem: str) -> tuple[ProofComparison, ProofOutcome] | None:
        """Repeats the comparison with all weights stored whole, after one device's backward failed with one block at a
        time. Raises InputError if it fails again."""
        if not self.streamed:
            raise no_gradients(self.trainer.plan.name, problem)
        self.streamed = StreamingLevel.NOTHING
        self.notes.append(WHOLE.format("the backward does not run a block at a time"))
        return self._content(content)

    def _side(self) -> ReferenceOptions:
        low = self.compute in LOW_PRECISION_FLOORS
        return ReferenceOptions(torch.float32 if low else self.compute, high=low, streamed=self.streamed)

    def _forward(
        self, content: ProofBatch, side: ReferenceOptions
    ) -> tuple[ReferenceRun | None, tuple[float, int, str]]:
        """Runs one device's forward. If a run by blocks has read absent weights, it runs again with more weights stored
        whole."""
        reference: ReferenceRun | None = None

        def run() -> tuple[float, int, str]:
            nonlocal reference
            reference = ReferenceRun(self.skeleton, self.engine, self.tensors, side)
            self._set_modes(reference.model)
            reference.expected, self.expected = self.expected, {}
            found = reference.forward(content.batch, 1.0)
            self.misplaced += reference.misplaced
            return (*found, "absent" if reference.is_absent else "")

        with isolate_pass(self.trainer, self.trains, self.seed):
            loss, labels, problem = self._on_first(run)
        if (problem or math.isnan(loss)) and side.streamed:
            self.streamed = StreamingLevel(side.streamed - 1)
            if not self.streamed:
                self.notes.append(WHOLE.format("weights of blocks are read outside of their forward"))
            return self._forward(content, replace(side, streamed=self.streamed))
        return reference, (loss, labels, problem)

    def _backward(
        self,
        reference: ReferenceRun | None,
        compared: ProofComparison | None,
        scale: float,
        sketches: dict[str, torch.Tensor] | None,
    ) -> str:
        """Runs one device's backward. `compared` gets the differences from the plan's gradients, which are requested
        only if it is given. Returns why it failed, or ''."""

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

        with isolate_pass(self.trainer, self.trains, self.seed):
            return self._on_first(run)[2]

    def _measure(
        self, content: ProofBatch, compared: ProofComparison, sketches: dict[str, torch.Tensor], scale: float
    ) -> None:
        """Measures, into `compared`, the plan against one device in the next higher precision, and one device's
        rounding in the plan's own precision. `sketches`: of the gradients in the higher precision, if present."""
        if not sketches and self.compute not in LOW_PRECISION_FLOORS:
            high, (loss, _, problem) = self._forward(
                content, ReferenceOptions(torch.float64, high=True, streamed=self.streamed)
            )
            if problem:
                self.notes.append(f"{content.title}: rounding was not measured ({problem})")
                return
            compared.losses = (loss, compared.losses[1])
            if problem := self._backward(high, compared, scale, sketches):
                raise no_gradients(self.trainer.plan.name, problem)
            del high
        low, (loss, _, problem) = self._forward(content, ReferenceOptions(self.compute, streamed=self.streamed))
        if problem:
            self.notes.append(f"{content.title}: rounding was not measured ({problem})")
            return
        mine: dict[str, torch.Tensor] = {}
        if problem := self._backward(low, None, 1.0, mine):
            raise no_gradients(self.trainer.plan.name, problem)
        compared.rounded = abs(loss - compared.losses[0])
        for name, gap in compared.gaps.items():
            if name in mine:
                gap.noise = float((mine[name] - sketches[name]).norm())

    def _draws(self, content: ProofBatch, loss: float) -> bool:
        """Returns whether one device's loss depends on random numbers. If so, both sides use eval mode from here on."""
        if not self.trains:
            return False
        self.seed += 1
        reference, (again, _, _) = self._forward(content, self._side())
        if reference is not None:
            reference.close()
        if abs(again - loss) <= RANDOMNESS_TOLERANCE * abs(loss):
            return False
        self.trains = False
        self.notes.append("the model draws random numbers beside dropout: compared in eval mode")
        return True

    # --- the plan's side --------------------------------------------------------------------------

    def _planned(self, batch: Batch) -> tuple[float, int, float, set[str]]:
        """Returns loss, labels, the loss scale, and the reached parameters. The gradients stay in the flat buffers."""
        trainer, zero = self.trainer, self.engine.zero
        factor = trainer.scale.factor
        try:
            while True:
                with isolate_pass(self.trainer, self.trains, self.seed), preserve_trainer(self.trainer):
                    loss, labels, squares = trainer._backward(dict(batch))
                    reached = set(zero.param_names) - set(zero.unused)
                if all(map(math.isfinite, squares)) or trainer.scale.factor <= 1.0:
                    return loss, labels, trainer.scale.factor, reached
                trainer.scale.factor /= 16.0  # in float16 the first scales of a run are too large
        finally:
            trainer.scale.factor = factor

    def _set_modes(self, model: nn.Module) -> None:
        """Sets the modes of the trainer's model. Modules of other stages keep those of the copy."""
        live = dict(self.engine.model.named_modules())
        for path, module in model.named_modules():
            if not self.trains:
                module.training = False
            elif path in live and type(live[path]) is type(module):
                module.training = live[path].training

    # --- location of a difference -------------------------------------------------------------------

    def _located(self, content: ProofBatch, found: tuple[ProofComparison, ProofOutcome]) -> str:
        """Describes the first difference: a misplaced weight, the first differing module, the loss, or the differing
        gradient nearest to it."""
        if misplaced := self._shared(self.misplaced):
            return f"first at {misplaced[0]}: the ranks have other values of it than the model had"
        ours, theirs = OutputDigests(), OutputDigests()

        def run() -> tuple[float, int, str]:
            reference = ReferenceRun(self.skeleton, self.engine, self.tensors, self._side())
            self._set_modes(reference.model)
            with theirs.of(reference.model):
                reference.forward(content.batch, 1.0)
            reference.close()
            return 0.0, 0, ""

        with isolate_pass(self.trainer, self.trains, self.seed):
            self._on_first(run)
        with (
            isolate_pass(self.trainer, self.trains, self.seed),
            preserve_trainer(self.trainer),
            ours.of_plan(self.engine),
        ):
            self.trainer._backward(dict(content.batch))
        limit = (
            LOW_PRECISION_FLOORS[self.compute][1]
            if self.compute in LOW_PRECISION_FLOORS
            else 100 * STRICT_TOLERANCES[self.compute][0]
        )
        named = first_differing_module(self.engine, self._shared(theirs.sums), ours, limit)
        _, verdict = found
        if not named and self.is_first and not verdict.loss <= verdict.loss_limit:
            named = "first at the loss: the outputs of all modules agree"
        elif not named and self.is_first and verdict.beyond:
            named = f"first in backward: gradient of {verdict.beyond[0]}"
        return self._shared(named)

    # --- results of rank 0 -------------------------------------------------------------------------

    def _on_first(self, run: Callable[[], tuple[float, int, str]]) -> tuple[float, int, str]:
        """Runs `run` on rank 0 while the others serve its requests. All ranks return its result or an error text."""
        found = (0.0, 0, "")
        if not self.is_first:
            self.tensors.serve()
        else:
            try:
                found = run()
            except Exception as error:
                found = (math.nan, 0, reason_of(error))
            finally:
                self.tensors.end()
        malloc_trim()
        return self._shared(found)

    def _agreed(self, good: bool) -> bool:
        return bool(self._shared(good))

    def _is_good(self, found: tuple[ProofComparison, ProofOutcome]) -> bool:
        compared, verdict = found
        return self._agreed(
            not self.misplaced
            and verdict.good
            and compared.labels[0] == compared.labels[1]
            and set(compared.reached) == compared.planned
        )

    def _shared(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        if self.trainer.mesh.world is None:
            return value
        box = [value if self.is_first else None]
        with interruptible_wait():
            dist.broadcast_object_list(box, 0)
        return box[0]

    def _proof(self, found: list[tuple[ProofComparison, ProofOutcome]], first: str) -> ProofResult:
        """Builds the result: the largest differences, and all else from the last batch (the differing one, if any)."""
        compared, verdict = found[-1]
        worst = max((each for _, each in found), key=lambda each: each.gradient / max(each.gradient_limit, 1e-300))
        worst = worst if verdict.good else verdict
        reached = set(compared.reached)
        order = list(self.engine.shapes)
        good = (
            not self.misplaced
            and verdict.good
            and compared.labels[0] == compared.labels[1]
            and reached == compared.planned
        )
        return ProofResult(
            plan=self.trainer.plan.name,
            precision=self.engine.recipe.name,
            equal=good,
            step=self.trainer.steps,
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
