"""Detects code that depends on the number of rows of a batch, such as `if len(x) > 8`. A plan runs micro-batches of a
few rows, one device runs all rows at once, and the other checks run at most a few rows.

A copy of the model on the meta device runs forwards with as many rows as a micro-batch and as many as the whole batch,
which costs no memory. If both call the same torch functions at the same places of the user's code, the number of rows
counts as harmless, and so does every number between them. Otherwise a forward of the whole batch is compared with
forwards of its micro-batches on the plan's ranks. The plan is refused if their losses differ.

A model that does not run on the meta device is not checked, and neither is code of the user's loss.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from meshwright.analysis.dry_run import MetaTwins, call_with_tensors, dry_run
from meshwright.analysis.example_inputs import MetaRunMode
from meshwright.analysis.model_copy import ModelCopy, isolated_run
from meshwright.core.errors import InputError, PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.code_paths import Path, Recorder, line_of
from meshwright.runtime.preflight.step_checks import CHECKS_ENV
from meshwright.spec.plan import Plan
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.passes import StepPasses
from meshwright.train.step.state import TrainState


class RowCounts:
    """The numbers of rows that were checked, on one rank. All ranks make equal calls. `copy`: the copy of the model, or
    None if it cannot be copied."""

    def __init__(self, copy: ModelCopy | None) -> None:
        self.copy = None if os.environ.get(CHECKS_ENV) == "never" else copy
        self._known: tuple[int, int] | None = None
        self._codes: dict[int, tuple[CodeType, int]] = {}

    def check(self, state: TrainState, batch: Batch | LocalBatch) -> None:
        """Checks the numbers of rows of the next step, unless they are known. Raises PlanRefused on all ranks if the
        model computes another loss for all rows at once than for micro-batches."""
        if self.copy is None or state.engine.outer is not None:
            return
        try:
            counts = row_counts(state.plan, batch)
        except InputError:  # the step says what is wrong with the batch
            return
        low, high = self._known or (counts[0], counts[0])
        if counts[0] == counts[-1] or (self._known and low <= counts[0] and counts[-1] <= high):
            return
        example = batch if isinstance(batch, dict) else batch.micro_batches[0]
        bounds = sorted({counts[0], counts[-1], low, high})
        paths = [self._path(state, example, rows) for rows in bounds]
        self._known = (bounds[0], bounds[-1])
        differs = next((path ^ paths[0] or path for path in paths if path != paths[0]), None)
        if not any(gather_objects(differs is not None)):
            return
        batches, _ = StepPasses().split(state, batch)
        found = state.engine.preflight.compare_row_counts(state.engine, batches, counts[-1])
        if found is not None:
            raise PlanRefused(
                Message(
                    "plan {plan}: the model runs other code for a batch of {rows} rows than for a micro-batch of "
                    "{fewer} ({place}), with a loss of {together:.6g} instead of {separate:.6g}: use dp1 with the "
                    "batch as one micro-batch, or code that does not depend on the number of rows",
                    plan=state.plan.name,
                    rows=counts[-1],
                    fewer=counts[0],
                    place=self._shown(differs or frozenset()),
                    together=found[0],
                    separate=found[1],
                )
            )

    def _path(self, state: TrainState, example: Batch, rows: int) -> Path:
        """Returns the call sites of a forward with `rows` rows. They are empty if the copy does not run."""
        assert self.copy is not None
        model = self.copy.model
        modes = dict(state.engine.model.named_modules())
        for path, module in model.named_modules():
            module.training = modes[path].training if path in modes else module.training
        recorder = Recorder(self._codes)
        twins = MetaTwins(model, None)
        inputs = state.engine.objective.inputs({name: _of_rows(value, rows) for name, value in example.items()})
        try:
            with dry_run(model, {}, as_it_trains=True), isolated_run(state.engine.model), MetaRunMode(), recorder:
                call_with_tensors(model, {**twins.parameters, **twins.buffers}, (), inputs)
        except Exception:  # the first step says what does not run
            return frozenset()
        return frozenset(recorder.places)

    def _shown(self, places: Path) -> str:
        """Returns the file and line of one of the call sites `places`."""
        found = [(self._codes[place.code][0], place.at) for place in places if place.code in self._codes]
        shown = sorted((code.co_filename.rpartition("/")[2], line_of(code, at)) for code, at in found)
        return f"{shown[0][0]}:{shown[0][1]}" if shown else "the user's code"


def row_counts(plan: Plan, batch: Batch | LocalBatch) -> Sequence[int]:
    """Returns the numbers of rows of the micro-batches and of the whole batch, in ascending order. They are equal on
    all ranks."""
    if isinstance(batch, dict):
        whole = num_rows(batch)
    elif not isinstance(batch, LocalBatch):
        return [0]
    else:
        whole = plan.uneven_batch or plan.rows_per_round * len(batch.micro_batches)
    parts = {min(plan.micro_batch_of(replica), whole) for replica in range(plan.dp)}
    return sorted(parts | {whole})


def _of_rows(value: Any, rows: int) -> Any:
    """Returns a meta tensor with `rows` rows in the form of `value`; a value that is no tensor with rows itself."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")
