"""The proof run: loss and every gradient of a small batch, under the plan on the real ranks and again as one device would.

Rule: both sides run in training mode, with the same weights and the same batch. The plan's side is the trainer's own backward pass. One device's
side streams through rank 0 (reference.py). Compared are the loss, the gradient of every parameter, the number of labels, and which parameters a
loss reaches. Weights, states of the optimizer, buffers, random states and counters are as before afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.anatomy.skeleton import Skeleton
from meshwright.base.errors import InputError
from meshwright.parallel.exchange.calls import watched
from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.gather import ElementRange, WholeTensors
from meshwright.parallel.objective import Batch, rows_of
from meshwright.parallel.perturbed import perturbed
from meshwright.spec.proof import Proof
from meshwright.train.contents import Content, contents_of
from meshwright.train.digests import Digests, first_differing
from meshwright.train.reference import Reference, Side, Streamed
from meshwright.train.tolerance import FLOORS, STRICT, Compared, Gap, Limits, Verdict, judged, sketch
from meshwright.train.untouched import quiet, untouched

if TYPE_CHECKING:
    from meshwright.train.trainer import Share, Trainer


DRAWN = 1e-9
"""Relative difference of two runs of one device that draw other numbers, and of no others."""


class NothingProven(InputError):
    """Every rank says so; training goes on as one device would."""


class Run:
    """One proof. All ranks make it and call `prove`; what rank 0 finds is the same on all."""

    def __init__(self, trainer: Trainer, skeleton: Skeleton, expected: Mapping[str, torch.Tensor] | None = None) -> None:
        """`expected`: fingerprints of the model's weights, where nothing has changed these since it was given."""
        self.trainer, self.engine, self.skeleton = trainer, trainer.engine, skeleton
        self.compute = getattr(torch, trainer.engine.recipe.compute)
        self.tensors = WholeTensors(trainer.engine, self.compute)
        self.is_first = trainer.mesh.rank == 0
        self.trains, self.seed = True, 1
        self.expected = dict(expected or {})
        self.misplaced: list[str] = []
        self.notes: list[str] = []
        self.streamed = Streamed.ROWS

    def prove(self, batch: Batch | Share, longest: int = 0) -> Proof:
        began = time.perf_counter()
        trainer, contents = self.trainer, contents_of(self.engine, batch, self.skeleton.loss is not None, longest)
        found: list[tuple[Compared, Verdict]] = []
        first, done = "", []
        with perturbed(self.engine) as constants:
            self.expected = {name: value for name, value in self.expected.items() if name not in constants}
            for content in contents:
                one = self._content(content)
                if one is None:
                    continue
                found.append(one)
                done.append(content.title + ("" if self.trains else " (in eval mode)"))
                if not self._is_good(one):
                    first = self._located(content, one)
                    break
        if not found:
            raise NothingProven(
                f"plan {trainer.plan.name}: the proof run proves nothing with this batch: {self.notes[-1]}: use another batch"
            )
        proof = self._proof(found, first) if self.is_first else None
        said = proof.model_dump() if proof is not None else {}
        said |= {
            "seconds": time.perf_counter() - began,
            "bytes": self.tensors.bytes,
            "contents": tuple(done),
            "notes": tuple(dict.fromkeys(self.notes)),
            "rows": sum(rows_of(content.batch) for content in contents[: len(done)]),
            "step": trainer.steps,
        }
        return Proof(**self._shared(said))

    # --- one content ----------------------------------------------------------------------------------------------------------

    def _content(self, content: Content) -> tuple[Compared, Verdict] | None:
        """None where one device cannot run the content, which is then noted."""
        side, low = self._side(), self.compute in FLOORS
        reference, (loss, labels, problem) = self._forward(content, side)
        if problem:
            if content.optional:
                self.notes.append(f"{content.title}: not proven, one device does not run it ({problem})")
                return None
            raise InputError(
                f"plan {self.trainer.plan.name}: the proof run cannot compute one device's side ({problem}): train without it with prove='never'"
            )
        planned, planned_labels, scale, reached = self._planned(content.batch)
        compared = Compared((loss, planned), (labels, planned_labels), planned=reached)
        sketches: dict[str, torch.Tensor] = {}
        self._backward(reference, compared, scale, sketches if low else None)
        if not self._agreed(all(map(math.isfinite, (loss, *(gap.norm for gap in compared.gaps.values()))))):
            self.notes.append(f"{content.title}: not proven, one device's loss or gradients are not finite")
            return None
        limits = Limits(*(FLOORS if low else STRICT)[self.compute], eps=torch.finfo(torch.float32 if low else self.compute).eps)
        del reference
        verdict = judged(compared, limits)
        if low or not self._agreed(verdict.good):
            self._measure(content, compared, sketches, scale)
            verdict = judged(compared, limits)
        if not self._agreed(verdict.good) and self._draws(content, loss):
            return self._content(content)
        return compared, verdict

    def _side(self) -> Side:
        low = self.compute in FLOORS
        return Side(torch.float32 if low else self.compute, high=low, streamed=self.streamed)

    def _forward(self, content: Content, side: Side) -> tuple[Reference | None, tuple[float, int, str]]:
        """One device's forward; with all weights stored whole, where a run by blocks has read some that were not there."""
        reference: Reference | None = None

        def run() -> tuple[float, int, str]:
            nonlocal reference
            reference = Reference(self.skeleton, self.engine, self.tensors, side)
            self._set_modes(reference.model)
            reference.expected, self.expected = self.expected, {}
            found = reference.forward(content.batch, 1.0)
            self.misplaced += reference.misplaced
            return (*found, "absent" if reference.is_absent else "")

        with quiet(self.trainer, self.trains, self.seed):
            loss, labels, problem = self._on_first(run)
        if (problem or math.isnan(loss)) and side.streamed:
            self.streamed = Streamed(side.streamed - 1)
            if not self.streamed:
                self.notes.append("weights of blocks are read outside of their forward: one device's side stored all weights")
            return self._forward(content, replace(side, streamed=self.streamed))
        return reference, (loss, labels, problem)

    def _backward(
        self, reference: Reference | None, compared: Compared | None, scale: float, sketches: dict[str, torch.Tensor] | None
    ) -> None:
        """One device's backward. `compared` gets its differences from the plan's gradients, which are not requested where this is None."""

        def compare(where: ElementRange, one: torch.Tensor) -> Callable[[int, torch.Tensor], None] | None:
            name, first, flat = where.name, where.start, one.reshape(-1)
            if sketches is not None:
                sketches[name] = sketch(name, one, first) + (sketches[name] if first else 0)
            if compared is None:
                return None
            if not first:
                compared.gaps[name] = Gap(self.engine.shapes[name].numel())
            gap = compared.gaps[name]
            return lambda start, planned: gap.add(flat[start - first : start - first + len(planned)], planned, scale)

        def run() -> tuple[float, int, str]:
            assert reference is not None
            reference.backward(compare)
            if compared is not None:
                compared.reached = reference.reached
            return 0.0, 0, ""

        with quiet(self.trainer, self.trains, self.seed):
            problem = self._on_first(run)[2]
        if problem:
            raise InputError(
                f"plan {self.trainer.plan.name}: the proof run cannot compute one device's gradients ({problem}): use prove='never'"
            )

    def _measure(self, content: Content, compared: Compared, sketches: dict[str, torch.Tensor], scale: float) -> None:
        """The plan against one device in the next higher precision, and rounding of one device in the plan's own; in `compared`. `sketches`: of the gradients in
        the higher precision, where they are there."""
        if not sketches and self.compute not in FLOORS:
            high, (loss, _, problem) = self._forward(content, Side(torch.float64, high=True, streamed=self.streamed))
            if problem:
                self.notes.append(f"{content.title}: rounding was not measured ({problem})")
                return
            compared.losses = (loss, compared.losses[1])
            self._backward(high, compared, scale, sketches)
            del high
        low, (loss, _, problem) = self._forward(content, Side(self.compute, streamed=self.streamed))
        if problem:
            self.notes.append(f"{content.title}: rounding was not measured ({problem})")
            return
        mine: dict[str, torch.Tensor] = {}
        self._backward(low, None, 1.0, mine)
        compared.rounded = abs(loss - compared.losses[0])
        for name, gap in compared.gaps.items():
            if name in mine:
                gap.noise = float((mine[name] - sketches[name]).norm())

    def _draws(self, content: Content, loss: float) -> bool:
        """Whether one device's loss depends on random numbers; both sides are then in eval mode from here on."""
        if not self.trains:
            return False
        self.seed += 1
        reference, (again, _, _) = self._forward(content, self._side())
        if reference is not None:
            reference.close()
        if abs(again - loss) <= DRAWN * abs(loss):
            return False
        self.trains = False
        self.notes.append("the model draws random numbers beside dropout: compared in eval mode")
        return True

    # --- the plan's side ------------------------------------------------------------------------------------------------------

    def _planned(self, batch: Batch) -> tuple[float, int, float, set[str]]:
        """Loss, labels, the loss scale of the gradients that are left in the flat units, and the parameters that the loss has reached."""
        trainer, zero = self.trainer, self.engine.zero
        factor = trainer.scale.factor
        try:
            while True:
                with quiet(self.trainer, self.trains, self.seed), untouched(self.trainer):
                    loss, labels, squares = trainer._backward(dict(batch))
                    reached = set(zero.names) - set(zero.unreached)
                if all(map(math.isfinite, squares)) or trainer.scale.factor <= 1.0:
                    return loss, labels, trainer.scale.factor, reached
                trainer.scale.factor /= 16.0  # in float16 the first scales of a run are too large
        finally:
            trainer.scale.factor = factor

    def _set_modes(self, model: nn.Module) -> None:
        """Modes of modules as the trainer's model has them; of those that this rank does not store, as when the copy was made."""
        live = dict(self.engine.model.named_modules())
        for path, module in model.named_modules():
            if not self.trains:
                module.training = False
            elif path in live and type(live[path]) is type(module):
                module.training = live[path].training

    # --- where --------------------------------------------------------------------------------------------------------------

    def _located(self, content: Content, found: tuple[Compared, Verdict]) -> str:
        """A weight that is not the model's, else the first module in order of execution whose output differs, else the loss, else the gradient nearest to
        it that differs."""
        if misplaced := self._shared(self.misplaced):
            return f"first at {misplaced[0]}: the ranks have other values of it than the model had"
        ours, theirs = Digests(), Digests()

        def run() -> tuple[float, int, str]:
            reference = Reference(self.skeleton, self.engine, self.tensors, self._side())
            self._set_modes(reference.model)
            with theirs.of(reference.model):
                reference.forward(content.batch, 1.0)
            reference.close()
            return 0.0, 0, ""

        with quiet(self.trainer, self.trains, self.seed):
            self._on_first(run)
        with quiet(self.trainer, self.trains, self.seed), untouched(self.trainer), ours.of_plan(self.engine):
            self.trainer._backward(dict(content.batch))
        limit = FLOORS[self.compute][1] if self.compute in FLOORS else 100 * STRICT[self.compute][0]
        named = first_differing(self.engine, self._shared(theirs.sums), ours, limit)
        _, verdict = found
        if not named and self.is_first and not verdict.loss <= verdict.loss_limit:
            named = "first at the loss: the outputs of all modules agree"
        elif not named and self.is_first and verdict.beyond:
            named = f"first in backward: gradient of {verdict.beyond[0]}"
        return self._shared(named)

    # --- what ranks share -----------------------------------------------------------------------------------------------------

    def _on_first(self, run: Callable[[], tuple[float, int, str]]) -> tuple[float, int, str]:
        """What `run` gives on rank 0, on every rank, which answer its requests meanwhile. A problem is given in words."""
        found = (0.0, 0, "")
        if not self.is_first:
            self.tensors.serve()
        else:
            try:
                found = run()
            except Exception as error:
                found = (math.nan, 0, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")
            finally:
                self.tensors.end()
        give_back()
        return self._shared(found)

    def _agreed(self, good: bool) -> bool:
        return bool(self._shared(good))

    def _is_good(self, found: tuple[Compared, Verdict]) -> bool:
        compared, verdict = found
        return self._agreed(
            not self.misplaced and verdict.good and compared.labels[0] == compared.labels[1] and set(compared.reached) == compared.planned
        )

    def _shared(self, value: Any) -> Any:
        """What rank 0 has."""
        if self.trainer.mesh.world is None:
            return value
        box = [value if self.is_first else None]
        with watched():
            dist.broadcast_object_list(box, 0)
        return box[0]

    def _proof(self, found: list[tuple[Compared, Verdict]], first: str) -> Proof:
        """Of all contents the largest differences; of the last one, which is the one that differs if any does, all else."""
        compared, verdict = found[-1]
        worst = max((each for _, each in found), key=lambda each: each.gradient / max(each.gradient_limit, 1e-300))
        worst = worst if verdict.good else verdict
        reached = set(compared.reached)
        order = list(self.engine.shapes)
        good = not self.misplaced and verdict.good and compared.labels[0] == compared.labels[1] and reached == compared.planned
        return Proof(
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
