"""Defines which tensors cross a stage boundary: the arguments of a block that depend on parameters.

For most models this is only the hidden state. Other models also send an encoder's output to every block of a decoder, a
position bias that the first block computes for all blocks, or the embeddings of another text.

[Note: carried] One run (analysis/dataflow_recorder.py) records which arguments of every block depend on parameters. A
stage ends at the entry of the first block of the next stage, and sends exactly these arguments. The model's own code
computes them. The code between two blocks runs once, on the stage of the earlier block. In backward, gradients return
to this stage.

With several stacks of blocks, the entry of a later stack may need tensors that are computed before all blocks (the
embeddings of a decoder). The first stage runs on to this entry, computes these tensors, and sends them too. In a later
stage's own run of the model, these arguments are only placeholders (outputs of layers on other stages, or None). The
stage replaces the placeholders by received tensors. A received tensor that a stage also sends on is a leaf of the
stage's graph. So in backward the gradients of all stages add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.analysis.dataflow import BlockArgument, BlockEntry, BlockExit, DataflowRecord, TracedOp, names_from_bits
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid


@dataclass(frozen=True)
class BoundarySpec:
    """Describes the tensors that cross stage boundaries.

    `needs`: for every block, the paths of arguments that depend on parameters. `firsts`: the first block of each stack.
    `early`: the arguments of later stacks that do not depend on blocks. `returns`: the number of values that a block
    returns, 0 for a bare tensor. `front`, `between`: names of parameters outside of the blocks, used before all blocks,
    or after a stack (by stack).
    """

    needs: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    early: frozenset[BlockArgument]
    returns: tuple[int, ...]
    front: frozenset[str]
    between: tuple[frozenset[str], ...]
    unsent: str = ""
    """The path of a block with an argument (a mask or integers) that depends on parameters but cannot be sent. '' if
    there is none."""
    overwritten: frozenset[BlockArgument] = frozenset()
    """Block arguments that the forward overwrites in place."""

    def message(self, block: int) -> tuple[BlockArgument, ...]:
        """Returns the block arguments that a stage receives if `block` is its first block."""
        later = [
            (first, place)
            for first in self.firsts
            if first > block
            for place in self.needs[first]
            if (first, place) in self.early
        ]
        return tuple([(block, place) for place in self.needs[block]] + later)

    def stack(self, block: int) -> int:
        """Returns the index of the stack that contains `block`."""
        return max(at for at, first in enumerate(self.firsts) if first <= block)

    @property
    def is_over_stacks(self) -> bool:
        """Whether stages are formed from more than one stack of blocks."""
        return len(self.firsts) > 1

    @property
    def is_more(self) -> bool:
        """Whether stages send tensors other than the hidden state."""
        return self.is_over_stacks or any(len(places) > 1 for places in self.needs)


@dataclass
class BoundaryState:
    """The state of one pass of a stage with blocks [start, stop): the received tensors, their placeholders in this
    stage's own run, and the tensors to send."""

    spec: BoundarySpec
    start: int = 0
    stop: int = 0
    arrived: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    leaving: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    stand_ins: dict[BlockArgument, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def begin(self, start: int, stop: int, received: Sequence[torch.Tensor]) -> None:
        """Starts a pass with the tensors `received` from the previous stage."""
        self.start, self.stop = start, stop
        self.arrived = dict(zip(self.spec.message(start), received, strict=True)) if received else {}
        # Tensors that blocks overwrite are cloned, because autograd forbids in-place writes to leaves.
        for key in self.spec.overwritten & self.arrived.keys():
            self.arrived[key] = self.arrived[key].clone()
        wanted = self.spec.message(stop) if stop < len(self.spec.needs) else ()
        self.leaving = {key: self.arrived[key] for key in wanted if key[0] != stop and key in self.arrived}
        self.stand_ins = {}

    def forget(self) -> None:
        """Drops all tensors of the pass."""
        self.arrived, self.leaving, self.stand_ins = {}, {}, {}

    def filled(self, block: int, leaves: list[Any]) -> list[Any]:
        """Returns the argument leaves of `block`, with received tensors in place of their placeholders."""
        stack = self.spec.stack(block)
        for place in self.spec.needs[block]:
            if (block, place) in self.arrived:
                self.stand_ins[stack, place] = (leaves[place], self.arrived[block, place])
            stand_in = self.stand_ins.get((stack, place))
            if stand_in is not None and leaves[place] is stand_in[0]:
                leaves[place] = stand_in[1]
        return leaves

    def leave(self, block: int, leaves: list[Any]) -> tuple[torch.Tensor, ...] | None:
        """Returns the message to the next stage at the entry of `block`, which is on another stage. Returns None while
        tensors of the message are missing."""
        if block < self.stop or self.stop >= len(self.spec.needs):
            return None
        wanted = self.spec.message(self.stop)
        leaves = self.filled(block, leaves)
        self.leaving.update({key: leaves[key[1]] for key in wanted if key[0] == block and key not in self.leaving})
        return tuple(self.leaving[key] for key in wanted) if len(self.leaving) == len(wanted) else None

    def skipped(self, block: int, hidden: torch.Tensor) -> Any:
        """Returns the output of `block`, which is on another stage: a placeholder."""
        return (hidden, *[None] * (self.spec.returns[block] - 1)) if self.spec.returns[block] else hidden


def trace_boundaries(record: DataflowRecord, anatomy: ModelGraph) -> BoundarySpec:
    """Returns which tensors cross stage boundaries: for each block, the arguments that depend on parameters.

    Raises:
        InputError: a block did not run.
    """
    paths = anatomy.block_paths
    entries: dict[int, BlockEntry] = {}
    returns: dict[int, int] = {}
    for event in record.events:
        if isinstance(event, BlockEntry):
            entries.setdefault(event.block, event)
        elif isinstance(event, BlockExit):
            returns.setdefault(event.block, event.values)
    missing = next((path for number, path in enumerate(paths) if number not in entries), None)
    if missing is not None:
        text = mark_msgid(
            "block {path} did not run with what the model seems to read: give an example of it, or use pp1"
        )
        raise InputError(Message(text, path=missing))
    ends = [0]
    for _, count in anatomy.stacks:
        ends.append(ends[-1] + count)
    stack_of = {
        name: at for at, (path, _) in enumerate(anatomy.stacks) for name in record.names if name.startswith(f"{path}.")
    }
    early: set[BlockArgument] = set()
    front: set[str] = set(record.params_without_grad)
    between: list[frozenset[str]] = []
    for at, first in enumerate(ends[:-1]):
        behind: set[str] = set()
        for place, leaf in entries[first].leaves.items():
            used = names_from_bits(record.names, leaf.made_from)
            if any(stack_of.get(name, at) < at for name in used):
                behind |= used
            else:
                early.add((first, place))
                front |= used
        if at:
            between.append(frozenset(behind - stack_of.keys() - front))
    changed = {storage for event in record.events if isinstance(event, TracedOp) for storage in event.changed}
    overwritten = (
        (block, place)
        for block, entry in entries.items()
        for place, leaf in entry.leaves.items()
        if leaf.copied in changed
    )
    unsent = (
        paths[block] for block, entry in entries.items() if not all(leaf.is_sent for leaf in entry.leaves.values())
    )
    return BoundarySpec(
        tuple(tuple(entries[block].leaves) for block in range(len(paths))),
        tuple(ends[:-1]),
        frozenset(early),
        tuple(returns[block] for block in range(len(paths))),
        frozenset(front),
        tuple(between),
        next(unsent, ""),
        frozenset(overwritten),
    )


def layers_over_stacks(model: nn.Module, anatomy: ModelGraph, spec: BoundarySpec) -> list[tuple[str, list[str]]]:
    """Returns (layer, parameter names) in forward order, with blocks numbered over all stacks. The layer 'between.K'
    follows the blocks of stack K.

    Raises:
        InputError: a parameter has no layer.
    """
    found: dict[str, list[str]] = {"embedding": [], "front": []}
    for number in range(len(spec.needs)):
        if number in spec.firsts[1:]:
            found[f"between.{spec.firsts.index(number) - 1}"] = []
        found[f"block.{number}"] = []
    found |= {"back": [], "head": []}
    embedded = model.get_submodule(anatomy.embedding).weight if anatomy.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(anatomy.head).parameters()} if anatomy.head else set()
    for name, parameter in model.named_parameters():
        block = next((at for at, path in enumerate(anatomy.block_paths) if name.startswith(f"{path}.")), None)
        behind = next((at for at, names in enumerate(spec.between) if name in names), None)
        if parameter is embedded:
            found["embedding"].append(name)
        elif block is not None:
            found[f"block.{block}"].append(name)
        elif name in spec.front:
            found["front"].append(name)
        elif behind is not None:
            found[f"between.{behind}"].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in anatomy.after_blocks:
            found["back"].append(name)
        else:
            raise InputError(
                Message(
                    "it cannot be told where {name} is used beside the blocks of several stacks: use pp1", name=name
                )
            )
    return [(layer, names) for layer, names in found.items() if names]
