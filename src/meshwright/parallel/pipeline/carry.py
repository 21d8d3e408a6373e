"""What goes from stage to stage where blocks need more than a hidden state: an encoder's output in every block of a decoder, a bias of positions that
the first block made for all, embeddings of another text.

[Note: carried] One run on the meta device tells of every block which of its arguments are made of parameters. A stage is left where the next one
begins: at the entry of its first block, with just these arguments, so that the model's own code has put them together. With several stacks of
blocks, what the entry of a later stack needs of parameters before all blocks (the embeddings of a decoder) is made by the first stage, which goes
on to that entry, and is passed along. A stage puts what arrived in the places where its own run of the model has only stand-ins: zeros of
absent layers, or nothing. What is passed along is a leaf of every stage's graph, so that its gradients add up on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from meshwright.anatomy import Anatomy
from meshwright.anatomy.experts import standing_in
from meshwright.anatomy.inputs import Example, Unasked, arguments, example_of
from meshwright.anatomy.learnt import Learnt
from meshwright.anatomy.observed import observed
from meshwright.base.errors import InputError

Key = tuple[int, int]
"""A block, and the place of one of its arguments."""


@dataclass(frozen=True)
class Wants:
    """`needs` of every block: places of arguments made of parameters. `firsts`: the first block of each stack. `early`: what the entries of later
    stacks need of no block. `returns`: values that a block returns, 0 for a bare tensor. `front`, `between`: parameters outside of the blocks by
    where they are used: before all of them, or (by stack) behind that stack's."""

    needs: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    early: frozenset[Key]
    returns: tuple[int, ...]
    front: frozenset[str]
    between: tuple[frozenset[str], ...]
    turn: str = ""
    """A block that runs behind one of a later stack: stacks that run by turns, as attentions and feed-forwards in lists of their own, are cut nowhere."""
    unsent: str = ""
    """A block that is given a mask, or numbers of things, that is made of parameters: messages have none of these."""

    def message(self, block: int) -> tuple[Key, ...]:
        """What a stage that begins with `block` is sent."""
        later = [(first, place) for first in self.firsts if first > block for place in self.needs[first] if (first, place) in self.early]
        return tuple([(block, place) for place in self.needs[block]] + later)

    def stack(self, block: int) -> int:
        return max(at for at, first in enumerate(self.firsts) if first <= block)


@dataclass
class Carry:
    """One pass of a stage of blocks [start, stop): what arrived, what stands in for it in this stage's own run, what leaves."""

    wants: Wants
    start: int = 0
    stop: int = 0
    arrived: dict[Key, torch.Tensor] = field(default_factory=dict)
    leaving: dict[Key, torch.Tensor] = field(default_factory=dict)
    stand_ins: dict[Key, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def begin(self, start: int, stop: int, received: Sequence[torch.Tensor]) -> None:
        self.start, self.stop = start, stop
        self.arrived = dict(zip(self.wants.message(start), received, strict=True)) if received else {}
        wanted = self.wants.message(stop) if stop < len(self.wants.needs) else ()
        self.leaving = {key: self.arrived[key] for key in wanted if key[0] != stop and key in self.arrived}
        self.stand_ins = {}

    def forget(self) -> None:
        self.arrived, self.leaving, self.stand_ins = {}, {}, {}

    def filled(self, block: int, leaves: list[Any]) -> list[Any]:
        """The arguments of `block` with what arrived in place of what stands in for it."""
        stack = self.wants.stack(block)
        for place in self.wants.needs[block]:
            if (block, place) in self.arrived:
                self.stand_ins[stack, place] = (leaves[place], self.arrived[block, place])
            stand_in = self.stand_ins.get((stack, place))
            if stand_in is not None and leaves[place] is stand_in[0]:
                leaves[place] = stand_in[1]
        return leaves

    def leave(self, block: int, leaves: list[Any]) -> tuple[torch.Tensor, ...] | None:
        """At the entry of a block that is not of the stage: the message to the next stage, once all of it is there."""
        if block < self.stop or self.stop >= len(self.wants.needs):
            return None
        wanted = self.wants.message(self.stop)
        leaves = self.filled(block, leaves)
        self.leaving.update({key: leaves[key[1]] for key in wanted if key[0] == block and key not in self.leaving})
        return tuple(self.leaving[key] for key in wanted) if len(self.leaving) == len(wanted) else None

    def skipped(self, block: int, hidden: torch.Tensor) -> Any:
        """What a block that is not of the stage returns."""
        return (hidden, *[None] * (self.wants.returns[block] - 1)) if self.wants.returns[block] else hidden


def carried(model: nn.Module, anatomy: Anatomy, example: Example | None = None) -> Wants | None:
    """What the blocks of `model` want, where it is more than a hidden state; None where that is all. Raises InputError when it cannot be told."""
    if len(anatomy.stacks) < 2 and not anatomy.beside:
        return None
    paths = anatomy.cuts
    state = {name: _on_meta(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    calls: dict[int, list[Any]] = {}
    returns: dict[int, int] = {}
    handles = []
    for number, path in enumerate(paths):
        block = model.get_submodule(path)
        handles.append(block.register_forward_pre_hook(_note(calls, number), with_kwargs=True))
        handles.append(block.register_forward_hook(_count(returns, number)))
    learnt = Learnt({id(state[name]): name for name, _ in model.named_parameters()})
    args, kwargs = arguments(example_of(model, example))
    try:
        with observed(model), torch.enable_grad(), torch.device("meta"), learnt, Unasked(), standing_in(model):
            output = functional_call(model, state, args, kwargs)
    except Exception as error:
        raise InputError(
            f"what goes from stage to stage of this model cannot be told ({(str(error).splitlines() or [type(error).__name__])[0][:80]}): give an example of what it reads, or use pp1"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) < len(paths):
        raise InputError(
            f"block {paths[min(set(range(len(paths))) - calls.keys())]} did not run with what the model seems to read: give an example of it, or use pp1"
        )
    wants = _wants(model, anatomy, state, calls, returns, _idle(model, state, output), learnt)
    unsent = (paths[at] for at, leaves in calls.items() for leaf in leaves if leaf in learnt and not leaf.is_floating_point())
    return replace(wants, turn=next((paths[after] for before, after in pairwise(calls) if after < before), ""), unsent=next(unsent, ""))


def _idle(model: nn.Module, state: Mapping[str, torch.Tensor], output: Any) -> set[str]:
    """Parameters that no gradient comes to, such as a table of sines: they stand with what begins the model."""
    weights = {name: state[name] for name, _ in model.named_parameters() if state[name].requires_grad}
    ends = [leaf for leaf in tree_flatten(output)[0] if _is_made(leaf)]
    found = torch.autograd.grad(ends, list(weights.values()), [torch.empty_like(end) for end in ends], retain_graph=True, allow_unused=True)
    return {name for name, gradient in zip(weights, found, strict=True) if gradient is None}


def _wants(
    model: nn.Module,
    anatomy: Anatomy,
    state: Mapping[str, torch.Tensor],
    calls: Mapping[int, list[Any]],
    returns: Mapping[int, int],
    idle: set[str],
    learnt: Learnt,
) -> Wants:
    ends = [0]
    for _, count in anatomy.stacks:
        ends.append(ends[-1] + count)
    stack_of = {name: at for at, (path, _) in enumerate(anatomy.stacks) for name in state if name.startswith(f"{path}.")}
    needs = tuple(tuple(place for place, leaf in enumerate(calls[block]) if _is_made(leaf) or leaf in learnt) for block in range(ends[-1]))
    weights = {name: state[name] for name, _ in model.named_parameters() if state[name].requires_grad}
    early: set[Key] = set()
    front: set[str] = set(idle)
    between: list[frozenset[str]] = []
    for at, first in enumerate(ends[:-1]):
        behind: set[str] = set()
        for place in needs[first]:
            used = _made_of(calls[first][place], weights) | learnt.made_of(calls[first][place])
            if any(stack_of.get(name, at) < at for name in used):
                behind |= used
            else:
                early.add((first, place))
                front |= used
        if at:
            between.append(frozenset(behind - stack_of.keys() - front))
    return Wants(
        needs, tuple(ends[:-1]), frozenset(early), tuple(returns[block] for block in range(ends[-1])), frozenset(front), tuple(between)
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.is_floating_point() and isinstance(tensor, nn.Parameter))


def _is_made(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _made_of(leaf: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> set[str]:
    if not leaf.requires_grad:
        return set()
    found = torch.autograd.grad(leaf, list(weights.values()), torch.empty_like(leaf), retain_graph=True, allow_unused=True)
    return {name for name, gradient in zip(weights, found, strict=True) if gradient is not None}


def _note(calls: dict[int, list[Any]], number: int) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[number] = tree_flatten((args, kwargs))[0]

    return note


def _count(returns: dict[int, int], number: int) -> Any:
    def count(module: nn.Module, args: Any, output: Any) -> None:
        returns[number] = len(output) if isinstance(output, tuple) else 0

    return count


def layers_over(model: nn.Module, anatomy: Anatomy, wants: Wants) -> list[tuple[str, list[str]]]:
    """(layer, parameter names) in forward order, blocks numbered over all stacks; 'between.K' what follows the blocks of stack K.

    Raises InputError when a parameter has no place.
    """
    found: dict[str, list[str]] = {"embedding": [], "front": []}
    for number in range(len(wants.needs)):
        if number in wants.firsts[1:]:
            found[f"between.{wants.firsts.index(number) - 1}"] = []
        found[f"block.{number}"] = []
    found |= {"back": [], "head": []}
    embedded = model.get_submodule(anatomy.embedding).weight if anatomy.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(anatomy.head).parameters()} if anatomy.head else set()
    for name, parameter in model.named_parameters():
        block = next((at for at, path in enumerate(anatomy.cuts) if name.startswith(f"{path}.")), None)
        behind = next((at for at, names in enumerate(wants.between) if name in names), None)
        if parameter is embedded:
            found["embedding"].append(name)
        elif block is not None:
            found[f"block.{block}"].append(name)
        elif name in wants.front:
            found["front"].append(name)
        elif behind is not None:
            found[f"between.{behind}"].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in anatomy.back:
            found["back"].append(name)
        else:
            raise InputError(f"it cannot be told where {name} is used beside the blocks of several stacks: use pp1")
    return [(layer, names) for layer, names in found.items() if names]
