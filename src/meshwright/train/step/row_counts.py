"""Detects code that depends on the number of rows of a batch, such as `if len(x) > 8`. A plan runs micro-batches of a
few rows, one device runs all rows at once, and the other checks run at most a few rows.

A copy of the model on the meta device runs forwards with as many rows as a micro-batch and as many as the whole batch,
which costs no memory. If both call the same torch functions at the same places of the user's code, the number of rows
counts as harmless, and so does every number between them. The sizes of the results must be c * rows + d with integers
c >= 0 and d: half of the rows (`x.chunk(2)`) or the first four (`x[:4]`) of a micro-batch are others than of the batch.
Otherwise a bisection finds the smallest number of rows with another forward, and a forward of so many rows is compared
with forwards of micro-batches on the plan's ranks. The plan is refused if their losses differ. If they do not, the
search goes on above this number, MAX_CHANGES times. A call site includes the plain numbers of arithmetic functions,
such as `x / max(len(x), 8)`. A forward of more than MAX_COMPARED_MICRO_BATCHES micro-batches might not fit in the
memory of a rank, so a line reports the code instead.

The same copy shows whether the model runs the same code for shorter rows (`Preflight.shortens`).

Of the user's loss, only call sites and sizes are compared, as far as it runs on the meta device. For a model that does
not run on the meta device, a forward of all rows, but of no more than MAX_COMPARED_MICRO_BATCHES micro-batches, is
compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

import torch

from meshwright.analysis.dry_run import MetaTwins, call_with_tensors, dry_run
from meshwright.analysis.example_inputs import MetaRunMode
from meshwright.analysis.model_copy import ModelCopy, isolated_run
from meshwright.core.errors import PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch
from meshwright.runtime.preflight.batch_separability import MAX_COMPARED_MICRO_BATCHES
from meshwright.runtime.preflight.code_paths import CallSite, Path, Recorder, describe_path
from meshwright.runtime.preflight.step_checks import CHECKS_ENV
from meshwright.train.step.state import TrainState

MAX_CHANGES = 4
"""The number of changes of the code with the number of rows that are compared, before that of the whole batch."""
UNKNOWN = -1
"""Returned instead of a number of rows if the copy does not run, or the user's code calls no torch function."""


class Forward(NamedTuple):
    """A forward with `rows` rows: its call sites with their numbers, and by call site the shapes of the results of each
    call."""

    rows: int
    path: Path
    shapes: Mapping[tuple[int, int], Sequence[Sequence[torch.Size]]]

    def other_sizes(self, other: Forward) -> Path:
        """Returns the call sites with a number of calls or results, or a size of a result, that is not c * rows + d in
        the two forwards."""
        return frozenset(
            CallSite(code, at, ())
            for (code, at), calls in self.shapes.items()
            if not self._grows_by_rows(other, calls, other.shapes.get((code, at), ()))
        )

    def _grows_by_rows(self, other: Forward, here: Any, there: Any) -> bool:
        """Compares two sizes, or two sequences of sizes and what they contain."""
        if isinstance(here, int):
            more, remainder = divmod(there - here, other.rows - self.rows)
            return more >= 0 and not remainder
        if not self._grows_by_rows(other, len(here), len(there)):
            return False
        return len(here) != len(there) or all(
            self._grows_by_rows(other, *pair) for pair in zip(here, there, strict=True)
        )


class RowCounts:
    """The numbers of rows that were checked. `copy`: the copy of the model, or None if it cannot be
    copied. `say` gets a line about code that is not compared."""

    def __init__(self, copy: ModelCopy | None, say: Callable[[str], None]) -> None:
        self._say = say
        self.copy = None if os.environ.get(CHECKS_ENV) == "never" else copy
        self._known: tuple[int, int] | None = None
        self._codes: dict[int, tuple[CodeType, int]] = {}

    def check(self, state: TrainState, batches: Sequence[Batch], rows: int, whole: bool) -> None:
        """Checks the numbers of rows of a step, unless they are known, after the ranks have compared their batches.

        `batches`: the micro-batches of this rank's replica. `rows`: the number of rows of the global batch. `whole`:
        whether every rank was given the global batch. Otherwise only the first step is checked, because later replicas
        may be given different numbers of rows. All ranks call it.

        Raises:
            PlanRefused: the model computes another loss for more rows at once than for micro-batches. Every rank raises
                it.
        """
        if self.copy is None or state.engine.outer is not None or (self._known is not None and not whole):
            return
        fewest = min(rows, *map(state.plan.micro_batch_of, range(state.plan.dp)))
        is_first = self._known is None
        low, high = self._known or (fewest, fewest)
        self._known = min(low, fewest), max(high, rows)
        if self._known == (low, high) or (is_first and state.engine.preflight.is_skipped):
            return
        bounds, low = sorted({fewest, rows, low, high}), min(fewest, low)
        for _ in range(MAX_CHANGES):
            found = gather_objects(self._next_other(state, batches[0], low, bounds))
            if min(found) == UNKNOWN:
                if rows > fewest:
                    self._compare(state, batches, fewest, low, min(rows, MAX_COMPARED_MICRO_BATCHES * fewest))
                return
            first = max(found)
            if not first or not self._compare(state, batches, fewest, low, first):
                return
            low = first
        if rows > low:
            self._compare(state, batches, fewest, low, rows)

    def accepts_shorter_rows(self, engine: Engine, batch: Batch, short: Batch) -> bool:
        """Returns whether a row of `batch` and a row of `short`, which has fewer positions, have the same call sites.
        Returns False if the copy does not run, or if `short` is `batch`. All ranks call it."""
        accepts = False
        if self.copy is not None and short is not batch:
            found = self._forward(engine, batch, 1)
            accepts = bool(found.path) and self._forward(engine, short, 1).path == found.path
        return all(gather_objects(accepts))

    def _compare(self, state: TrainState, batches: Sequence[Batch], fewest: int, low: int, first: int) -> bool:
        """Compares a forward of `first` rows, whose call sites differ from those of `low` rows, with forwards of
        micro-batches of `fewest` rows. Returns False if they are too many rows; then a line says so."""
        here, other = (self._forward(state.engine, batches[0], rows) for rows in (low, first))
        sites = (here.path ^ other.path) or here.other_sizes(other)
        where = describe_path(self._codes, sites)
        if first > MAX_COMPARED_MICRO_BATCHES * fewest:
            self._say(
                Message(
                    "the model runs other code for batches of {rows} rows or more ({place}), which is not compared "
                    "with one device",
                    rows=first,
                    place=where,
                )
            )
            return False
        found = state.engine.preflight.compare_row_counts(state.engine, batches, first)
        if found is not None:
            raise PlanRefused(
                Message(
                    "plan {plan}: {rows} rows have a loss of {together:.6g} in one pass but {separate:.6g} in "
                    "micro-batches of {fewer}{place}: use dp1 with the batch as one micro-batch, or code that does not "
                    "depend on the number of rows",
                    plan=state.plan.name,
                    rows=first,
                    fewer=fewest,
                    place=Message("; the code depends on the number of rows at {place}", place=where) if sites else "",
                    together=found[0],
                    separate=found[1],
                )
            )
        return True

    def _next_other(self, state: TrainState, example: Batch, low: int, bounds: Sequence[int]) -> int:
        """Returns the smallest number of rows above `low` with other call sites than `low`, if one of `bounds` above
        `low` has other call sites, otherwise 0. Returns UNKNOWN if the copy does not run."""
        found = self._forward(state.engine, example, low)
        if not found.path:
            return UNKNOWN
        other = next((each for each in bounds if each > low and self._is_other(state, example, found, each)), 0)
        return self._first_other(state, example, found, other) if other else 0

    def _first_other(self, state: TrainState, example: Batch, found: Forward, high: int) -> int:
        """Returns the smallest number of rows above those of `found` with another forward, which `high` has, by
        bisection."""
        low = found.rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_other(state, example, found, middle) else (middle, high)
        return high

    def _is_other(self, state: TrainState, example: Batch, found: Forward, rows: int) -> bool:
        other = self._forward(state.engine, example, rows)
        return other.path != found.path or bool(found.other_sizes(other))

    def _forward(self, engine: Engine, example: Batch, rows: int) -> Forward:
        """Returns a forward with `rows` rows. Its path is empty if the copy does not run."""
        assert self.copy is not None
        model = self.copy.model
        modes = dict(engine.model.named_modules())
        for path, module in model.named_modules():
            module.training = modes[path].training if path in modes else module.training
        recorder, loss = Recorder(self._codes, records_shapes=True), engine.objective.loss
        twins = MetaTwins(model, None)
        batch = {name: _of_rows(value, rows) for name, value in example.items()}
        inputs = engine.objective.inputs(batch)
        try:
            with (
                dry_run(model, {}, as_it_trains=True, loss=loss),
                isolated_run(engine.model),
                torch.device("meta"),
                MetaRunMode(),
                recorder,
            ):
                output = call_with_tensors(model, {**twins.parameters, **twins.buffers}, (), inputs)
                numbers = {CallSite(code, at, numbers) for code, at, numbers in recorder.numbers}
                if loss is not None and engine.batch_loss is None:
                    with suppress(Exception):  # a loss that reads values does not run on the meta device
                        loss(output, batch)
        except Exception:  # the first step says what does not run
            return Forward(rows, frozenset(), {})
        return Forward(rows, frozenset({*recorder.places, *numbers}), recorder.shapes)


def _of_rows(value: Any, rows: int) -> Any:
    """Returns a meta tensor with `rows` rows in the form of `value`; a value that is no tensor with rows itself."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")
