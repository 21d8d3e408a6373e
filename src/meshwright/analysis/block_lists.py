"""Finds the lists of blocks of a model, determines which of them pipeline stages can cut (the stacks), and assigns
parameters to layers. The analysis, the pipeline and the tensor-parallel runtime use the results.

A block is one of several modules of equal class in a list. Pipeline stages begin where one block passes a hidden state
to the next. So a list is a stack if its blocks return the shape that they receive. For example, the encoder of an audio
model is a stack. The convolutions before this encoder shorten their input, so they count as layers before all blocks,
like the embedding. Lists that pass hidden states directly to each other form a group. The lists of a group are stacks
only if all blocks of the group preserve the shape. If no group preserves the shape, all lists that run are stacks. An
example is a residual network, where each list begins with a block that changes the shape. If no weight of a list is
read, the list is not a stack but counts as a layer before the blocks. An example is the vision encoder of a model that
receives only text.

Guarantees:
- Every parameter is in exactly one layer. A tied parameter is in the layer that uses it first (the embedding).

`hidden_of` and the functions after it define the calling convention of blocks: where the hidden state is among the
arguments and in the output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.trace_log import TraceLog
from meshwright.core.errors import InputError
from meshwright.core.messages import Message


def params_by_layer(model: nn.Module, graph: ModelGraph) -> list[tuple[str, list[str]]]:
    """Returns (layer, parameter names) in forward order. Layers without parameters are omitted.

    'embedding' is the vocabulary embedding. 'front' has all other parameters before the blocks. 'head' is the
    vocabulary head, and 'back' has all other parameters after the blocks. If blocks are numbered over several stacks,
    'between.N' follows 'block.N', the last block of a stack. In a model without a list of blocks, each child with
    parameters is a block.
    """
    named = dict(model.named_parameters())
    if graph.blocks is None:
        children = dict.fromkeys(name.partition(".")[0] for name in named)
        return [
            (f"block.{index}", [n for n in named if n.partition(".")[0] == child])
            for index, child in enumerate(children)
        ]
    stacks = graph.stacks if graph.spans_stacks else ((graph.blocks, graph.count),)
    found: dict[str, list[str]] = {"embedding": [], "front": []}
    places: dict[str, str] = {}
    number = 0
    for at, (path, _) in enumerate(stacks):
        for child, _ in model.get_submodule(path).named_children():
            places[f"{path}.{child}"] = f"block.{number}"
            found[f"block.{number}"] = []
            number += 1
        if at < len(stacks) - 1:
            found[f"between.{number - 1}"] = []
    behind = {
        name: place
        for place, names in zip([p for p in found if p.startswith("between.")], graph.between_stacks, strict=False)
        for name in names
    }
    found.update({"back": [], "head": []})
    embedded = model.get_submodule(graph.embedding).weight if graph.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(graph.head).parameters()} if graph.head else set()
    back = set(graph.after_blocks)
    past = False
    for name, parameter in named.items():
        block = next(
            (places[name[:end]] for end in range(len(name)) if name[end] == "." and name[:end] in places), None
        )
        past = past or block is not None
        if parameter is embedded:
            found["embedding"].append(name)
        elif block is not None:
            found[block].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in behind:
            found[behind[name]].append(name)
        elif name in back or (graph.embedding is None and past):
            found["back"].append(name)
        else:
            found["front"].append(name)
    return [(layer, names) for layer, names in found.items() if names]


def check_distinct_blocks(model: nn.Module, lists: list[str]) -> None:
    """Checks that no list contains one module twice.

    Raises:
        InputError: a list contains a module twice.
    """
    for path in lists:
        first: dict[int, str] = {}
        for name, block in model.get_submodule(path)._modules.items():
            if first.setdefault(id(block), name) != name:
                raise InputError(
                    Message(
                        "{path}.{name} and {path}.{first} are the same module, but each entry of a list of blocks "
                        "must be a separate module: copy it (copy.deepcopy), or call it twice in one block",
                        path=path,
                        name=name,
                        first=first[id(block)],
                    )
                )


def find_block_lists(model: nn.Module) -> list[str]:
    """Returns the paths of the outermost lists of blocks.

    All elements of the list must have submodules and be of one class. A `ModuleList` may have elements of several
    classes if at least one class occurs twice. A list of lists does not count, because an inner list is never called.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if (
            not name
            or any(name.startswith(f"{path}.") for path in found)
            or not isinstance(module, nn.ModuleList | nn.Sequential)
        ):
            continue
        children = list(module.children())
        kinds = {type(child) for child in children}
        is_uniform = len(kinds) == 1 or (isinstance(module, nn.ModuleList) and len(children) > len(kinds))
        if children and is_uniform and all(_may_be_block(child) for child in children):
            found.append(name)
    return found


def _may_be_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def main_block_list(model: nn.Module, stacks: Sequence[str], seen: TraceLog | None) -> str:
    """Returns the path of the stack with the most parameters, among the stacks that ran (all `stacks` if none ran).

    If a multimodal model receives only text, its largest stack may not run.
    """
    ran = [path for path in stacks if seen is not None and any(block.startswith(f"{path}.") for block in seen.blocks)]
    return max(
        ran or stacks, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters())
    )


def is_list_used(path: str, seen: TraceLog | None) -> bool:
    """Returns whether the traced forward read any weight in the list at `path`. For example, it reads no weight of a
    vision encoder if the model receives only text. Returns True if there is no trace (`seen` is None).
    """
    return seen is None or any(name.startswith(f"{path}.") for name in seen.order)


def block_stacks(lists: Sequence[str], seen: TraceLog | None) -> list[str]:
    """Returns the stacks among `lists`, in the order in which they run. Without a trace (`seen` is None) all lists are
    stacks.

    If code reads weights of a list but calls none of its blocks, this list is a stack too and comes last.
    """
    if seen is None:
        return list(lists)
    blocks = {path: [block for block in seen.blocks if block.startswith(f"{path}.")] for path in lists}
    order = list(seen.blocks)
    ran = sorted((path for path in lists if blocks[path]), key=lambda path: order.index(blocks[path][0]))
    runs: list[list[str]] = []
    for path in ran:
        if runs and seen.hidden_uses[blocks[path][0]].from_block:
            runs[-1].append(path)
        else:
            runs.append([path])
    shape_keeping = [
        run for run in runs if all(seen.hidden_uses[block].same_shape for path in run for block in blocks[path])
    ]
    not_run = [path for path in lists if not blocks[path] and is_list_used(path, seen)]
    return [path for run in shape_keeping or runs for path in run] + not_run or list(lists)


def params_between_stacks(stacks: Sequence[str], order: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Returns, for each stack except the last, the parameters that are first used between this stack and the next.
    `stacks` are in the order in which they run. `order` maps parameter names to the order of their first use.

    >>> order = {"table": 0, "one.0.weight": 1, "norm.weight": 2, "two.0.weight": 3, "last": 4}
    >>> params_between_stacks(["one", "two"], order)
    (('norm.weight',),)
    """
    ends = [max((place for name, place in order.items() if name.startswith(f"{path}.")), default=-1) for path in stacks]
    outside = {name: place for name, place in order.items() if not any(name.startswith(f"{path}.") for path in stacks)}
    return tuple(
        tuple(name for name, place in outside.items() if end < place < following) for end, following in pairwise(ends)
    )


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the hidden state among the arguments of a block: the first positional argument. Without positional
    arguments, it is the keyword argument `hidden_states`, otherwise the first keyword argument.
    """
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a block with `hidden` in place of the hidden state (see `hidden_of`)."""
    if args:
        return (hidden, *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: hidden}


def map_first(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Returns `output` of a block with `function` applied to the hidden state. The hidden state is the first element of
    a tuple or list, or the first value of a dict, otherwise the output itself.

    >>> map_first(lambda value: value + 1, {"hidden": 1, "extra": 1})
    {'hidden': 2, 'extra': 1}
    """
    if isinstance(output, dict):
        changed = copy.copy(output)
        for name, value in islice(output.items(), 1):
            changed[name] = function(value)
        return changed
    if isinstance(output, tuple) and hasattr(output, "_make"):  # a NamedTuple
        return type(output)(function(output[0]), *output[1:])
    return type(output)([function(output[0]), *output[1:]]) if isinstance(output, tuple | list) else function(output)
