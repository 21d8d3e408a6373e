"""One device's side of a proof: rank 0 computes it, and the other ranks serve its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.analysis.model_copy import ModelCopy
from meshwright.core.printable_text import reason_of
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait
from meshwright.runtime.gather_service import ElementRange, GatherService
from meshwright.runtime.host_heap import malloc_trim
from meshwright.runtime.loss.objective import Batch
from meshwright.train.proof.isolated_pass import isolate_pass
from meshwright.train.proof.output_digests import OutputDigests
from meshwright.train.proof.proof_batches import ProofBatch
from meshwright.train.proof.proof_tolerance import (
    LOW_PRECISION_FLOORS,
    GradientGap,
    ProofComparison,
    sketch_gradient,
)
from meshwright.train.proof.reference_run import ReferenceOptions, ReferenceRun, StreamingLevel

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
