"""Repeats the analysis for batches that differ from its example.

The analysis before sharding runs the model with an example. If the inputs of a batch have other names, dtypes or
numbers of dimensions, the model's code may take other branches. For such a batch the analysis runs again on a meta copy
of the model. The plan is refused if the result differs from that of the first analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.analysis.dataflow import DataflowRecord, WeightUses, is_within
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.analysis.example_inputs import ExampleInputs, make_example
from meshwright.analysis.model_copy import copy_to_meta, isolated_run
from meshwright.core.errors import InputError, PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.pipeline.block_wrapper import BoundarySpec

InputSignature = frozenset[tuple[str, str, int]]
"""The inputs of a model as (name, dtype, number of dimensions)."""


def input_signature(inputs: Mapping[str, Any]) -> InputSignature:
    """Returns the signature of the inputs of a model.

    >>> sorted(input_signature({"ids": torch.zeros(2, 3, dtype=torch.long), "flag": True}))
    [('flag', 'bool', 0), ('ids', 'torch.int64', 2)]
    """
    return frozenset(
        (name, str(value.dtype), value.ndim) if isinstance(value, torch.Tensor) else (name, type(value).__name__, 0)
        for name, value in inputs.items()
    )


def _shapes_and_values(example: ExampleInputs) -> dict[str, Any]:
    """Returns by name the dtype and shape of each tensor, and the value of each number, bool, string or None. Replaces
    any other value by a new object, which equals no other object."""

    def size(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape
        return value if isinstance(value, bool | int | float | str | None) else object()

    return {name: size(value) for name, value in example.items()}


@dataclass
class AnalysisGuard:
    """Checks whether the plan is also valid for batches that differ from the example of the analysis.

    `model`, `blocks` and `example` are the inputs of the analysis before sharding. The results of this analysis are
    `boundary`, `stages` (the stages of each parameter by name) and `reads` (the modules that read each parameter).
    `derive` computes boundary and stages from a new record, or raises InputError.
    """

    plan: str
    model: nn.Module
    blocks: Sequence[str]
    example: ExampleInputs
    boundary: BoundarySpec | None
    stages: Mapping[str, Sequence[int]]
    reads: WeightUses
    derive: Callable[[DataflowRecord], tuple[BoundarySpec | None, Mapping[str, Sequence[int]]]]
    forms: set[InputSignature] = field(default_factory=set)
    """Signatures of the batches for which the plan is valid."""
    skeleton: nn.Module | None = field(init=False, default=None)
    """An independent meta copy of the model before sharding. None if no copy is possible, or if the copy behaves
    differently from the model. `why` is the reason."""
    why: str = field(init=False, default="")
    was_training: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.was_training = self.model.training
        try:
            self.skeleton = copy_to_meta(self.model).model
        except InputError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self.skeleton, self.why = None, why
        self.forms.add(input_signature(self.example))

    def check(self, inputs: Mapping[str, Any], is_training: bool, together: bool) -> None:
        """Checks that the plan is valid for `inputs`.

        `together`: whether all ranks call this method. If so, all ranks refuse the plan if one rank does.

        Raises:
            PlanRefused: the plan is not valid for `inputs`, or the check cannot run.
        """
        form = input_signature(inputs)
        if form in self.forms and not together:
            return
        line = "" if form in self.forms else self._objection(inputs, is_training)
        if together:
            line = next(filter(None, gather_objects(line)), "")
        if line:
            raise PlanRefused(Message("plan {plan}: {message}", plan=self.plan, message=line))
        self.forms.add(form)

    def _objection(self, inputs: Mapping[str, Any], is_training: bool) -> str:
        """Returns why the plan is not valid for `inputs`, or '' if it is valid. If the analysis of the copy with
        `inputs` differs from that of the plan, the copy is also analysed with the example. This shows whether `inputs`
        or the copy causes the difference."""
        objection, is_known = self._found(inputs, is_training)
        if not is_known and self.skeleton is not None:
            why, is_known = self._found(self.example, self.was_training)
            if not is_known:
                self._give_up(why or Message("the copy does not read the same parameters as the model"))
        if not objection or input_signature(inputs) in self.forms:
            return ""
        given, known = ", ".join(sorted(inputs)), ", ".join(sorted(self.example))
        if self.skeleton is None:
            return Message(
                "the model was analysed with the inputs {known} and cannot be analysed again with {given}, because no "
                "copy of it can run ({why}): give parallelize a training batch as example=...",
                known=known,
                given=given,
                why=self.why,
            )
        return Message(
            "the model was analysed with the inputs {known} but runs differently with {given} ({why}): give "
            "parallelize a training batch as example=...",
            known=known,
            given=given,
            why=objection,
        )

    def _is_example(self, inputs: Mapping[str, Any], is_training: bool) -> bool:
        """Returns whether the analysis would get the same dtypes, shapes and plain values for `inputs` as it got for
        the example. If so, it need not run again."""
        if self.skeleton is None or is_training != self.was_training:
            return False
        return _shapes_and_values(make_example(self.skeleton, inputs)) == _shapes_and_values(
            make_example(self.skeleton, self.example)
        )

    def _found(self, inputs: Mapping[str, Any], is_training: bool) -> tuple[str, bool]:
        """Runs the analysis on the copy. Returns a description of the first difference from the analysis of the plan,
        '' if there is none. Also returns whether the two agree: no difference, and the same parameters were read."""
        if self.skeleton is None:
            return self.why, False
        if self._is_example(inputs, is_training) and inputs is not self.example:
            return "", True
        if self.skeleton.training != is_training:
            self.skeleton.train(is_training)
        try:
            record, derived = self._analysed(inputs)
        except InputError as error:
            return str(error).removeprefix(f"plan {self.plan}: "), False
        difference = self._difference(record, derived)
        return difference, not difference and record.reads.keys() == self.reads.keys()

    def _difference(
        self, record: DataflowRecord, derived: tuple[BoundarySpec | None, Mapping[str, Sequence[int]]]
    ) -> str:
        """Returns a description of the first result that differs from the analysis of the plan, or '' if none
        differs."""
        needs, stored = derived
        if needs is not None and self.boundary is not None:
            if (needs.needs, needs.returns) != (self.boundary.needs, self.boundary.returns):
                return "other arguments of its blocks depend on parameters, or a block returns more or fewer values"
            if not needs.overwritten <= self.boundary.overwritten:
                return "a block overwrites one of its arguments in place"
        astray = next(
            (name for name, stages in stored.items() if not set(stages) <= set(self.stages.get(name, ()))), None
        )
        if astray is not None:
            return f"{astray} is read on a pipeline stage that does not store it"
        return next(
            (f"{name} is read in {path or 'its own forward'}" for name, path in self._new_readers(record.reads)), ""
        )

    def _analysed(
        self, inputs: Mapping[str, Any]
    ) -> tuple[DataflowRecord, tuple[BoundarySpec | None, Mapping[str, Sequence[int]]]]:
        """Returns the record of a run of the copy with `inputs`, and the boundary and stages derived from it.

        Raises:
            InputError: the run fails, or the copy refers to the model itself.
        """
        assert self.skeleton is not None
        with isolated_run(self.model) as separate:
            try:
                record = record_dataflow(self.skeleton, self.blocks, inputs)
            except InputError as error:
                raise InputError(separate.reached or str(error)) from None
        if separate.reached:
            raise InputError(separate.reached)
        return record, self.derive(record)

    def _new_readers(self, reads: WeightUses) -> list[tuple[str, str]]:
        """Returns (parameter, module path) for each module that reads a parameter according to `reads`, but did not
        read it in the analysis of the plan. Excludes the module that owns the parameter."""
        found = []
        for name, readers in reads.items():
            known = {reader.path for reader in self.reads.get(name, ())} | {name.rpartition(".")[0]}
            found += [
                (name, reader.path)
                for reader in readers
                if not is_within(reader.path, known) and reader.path not in known
            ]
        return found
