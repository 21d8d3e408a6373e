"""What a plan took from the analysis run of its model, held against the batches that come.

The run before the model is sharded is made with an example. A batch with other inputs, of other types or dimensions, may take other branches of the
model's code: the same run is made with it, on a copy of the model without memory, and the plan is refused where it would have been made otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.inputs import Example, example_of
from meshwright.anatomy.readers import Reads, inside
from meshwright.anatomy.record import Record
from meshwright.anatomy.run import analyse
from meshwright.anatomy.skeleton import isolated, skeleton_of
from meshwright.base.errors import InputError, PlanRefused
from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.pipeline.carry import Wants

Form = frozenset[tuple[str, str, int]]
"""Of the inputs of a model: names, types, dimensions."""


def form_of(inputs: Mapping[str, Any]) -> Form:
    """
    >>> sorted(form_of({"ids": torch.zeros(2, 3, dtype=torch.long), "flag": True}))
    [('flag', 'bool', 0), ('ids', 'torch.int64', 2)]
    """
    return frozenset(
        (name, str(value.dtype), value.ndim) if isinstance(value, torch.Tensor) else (name, type(value).__name__, 0)
        for name, value in inputs.items()
    )


def _sizes(example: Example) -> dict[str, Any]:
    """By name: type and shape of tensors, plain values; of anything else nothing that equals another."""

    def size(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape
        return value if isinstance(value, bool | int | float | str | None) else object()

    return {name: size(value) for name, value in example.items()}


@dataclass
class Analysed:
    """`model` and `blocks`: what was run with `example` before the model was sharded. `wants` and `held`, by name the stages that hold a parameter, and `reads`: what the plan was made by.
    `derive` gives the first two for another record, or raises InputError."""

    plan: str
    model: nn.Module
    blocks: Sequence[str]
    example: Example
    wants: Wants | None
    held: Mapping[str, Sequence[int]]
    reads: Reads
    derive: Callable[[Record], tuple[Wants | None, Mapping[str, Sequence[int]]]]
    forms: set[Form] = field(default_factory=set)
    """Of batches that the plan holds for."""
    skeleton: nn.Module | None = field(init=False, default=None)
    """A copy of the model that runs by itself, made before it is sharded; None where none does, for the reason `why`."""
    why: str = field(init=False, default="")
    was_training: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.was_training = self.model.training
        try:
            self.skeleton = skeleton_of(self.model).model
        except InputError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self.skeleton, self.why = None, why
        self.forms.add(form_of(self.example))

    def check(self, inputs: Mapping[str, Any], is_training: bool, together: bool) -> None:
        """Raises PlanRefused where `inputs` would have made another plan, or where this cannot be known. `together`: all ranks call it, and refuse alike."""
        form = form_of(inputs)
        if form in self.forms and not together:
            return
        line = "" if form in self.forms else self._objection(inputs, is_training)
        if together:
            line = next(filter(None, gather_objects(line)), "")
        if line:
            raise PlanRefused(f"plan {self.plan}: {line}")
        self.forms.add(form)

    def _objection(self, inputs: Mapping[str, Any], is_training: bool) -> str:
        """Why the plan does not hold for `inputs`; '' where it does. The copy runs with the example only to tell what `inputs` change from what the copy does."""
        objection, is_known = self._found(inputs, is_training)
        if not is_known and self.skeleton is not None:
            why, is_known = self._found(self.example, self.was_training)
            if not is_known:
                self._give_up(why or "a copy of it reads other parameters than the model")
        if not objection or form_of(inputs) in self.forms:
            return ""
        given, known = ", ".join(sorted(inputs)), ", ".join(sorted(self.example))
        remedy = "give parallelize a batch as it comes (example=...)"
        if self.skeleton is None:
            return f"the model was analysed with {known} and cannot be analysed again with {given}, for no copy of it runs by itself ({self.why}): {remedy}"
        return f"with {given} the model runs otherwise than with {known}, which it was analysed with ({objection}): {remedy}"

    def _is_example(self, inputs: Mapping[str, Any], is_training: bool) -> bool:
        """Whether the run before the model was sharded was made with the same types and sizes, so that another would be the same."""
        if self.skeleton is None or is_training != self.was_training:
            return False
        return _sizes(example_of(self.skeleton, inputs)) == _sizes(example_of(self.skeleton, self.example))

    def _found(self, inputs: Mapping[str, Any], is_training: bool) -> tuple[str, bool]:
        """Runs the copy. Returns what differs from what the plan was made by, '' where nothing does, and whether the same parameters were read and nothing differs."""
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

    def _difference(self, record: Record, derived: tuple[Wants | None, Mapping[str, Sequence[int]]]) -> str:
        """What the plan would have been made otherwise by; '' where it is the same."""
        wants, held = derived
        if wants is not None and self.wants is not None:
            if (wants.needs, wants.returns) != (self.wants.needs, self.wants.returns):
                return "its blocks are given other things that are made of parameters"
            if not wants.overwritten <= self.wants.overwritten:
                return "a block overwrites what it is given"
        astray = next((name for name, stages in held.items() if not set(stages) <= set(self.held.get(name, ()))), None)
        if astray is not None:
            return f"{astray} is read on a stage that does not hold it"
        return next((f"{name} is read in {path or 'its own forward'}" for name, path in self._new_readers(record.reads)), "")

    def _analysed(self, inputs: Mapping[str, Any]) -> tuple[Record, tuple[Wants | None, Mapping[str, Sequence[int]]]]:
        """The record of a run with `inputs`, and what a plan takes from it. Raises InputError, also where the copy leads to the model itself."""
        assert self.skeleton is not None
        with isolated(self.model) as apart:
            try:
                record = analyse(self.skeleton, self.blocks, inputs)
            except InputError as error:
                raise InputError(apart.reached or str(error)) from None
        if apart.reached:
            raise InputError(apart.reached)
        return record, self.derive(record)

    def _new_readers(self, reads: Reads) -> list[tuple[str, str]]:
        """Readers outside of the modules that were seen to read, and of the one that holds the parameter."""
        found = []
        for name, readers in reads.items():
            known = {reader.path for reader in self.reads.get(name, ())} | {name.rpartition(".")[0]}
            found += [(name, reader.path) for reader in readers if not inside(reader.path, known) and reader.path not in known]
        return found
