"""A model's parameters in the layers that pipelines cut between and ZeRO-3 gathers: embedding, front, blocks, back,
head.

Promise: every parameter stands in exactly one layer, tied ones where they are first used (the embedding).

Which lists of modules are blocks, and which of them the stages of a pipeline cut: the stacks.

Rule: a block is one of like modules in a list. Stages begin where a hidden state is handed on, so the lists whose
blocks give the form that they are
given are stacks, as the encoder behind the convolutions of a model of sound, which shorten what they are given: these
run before all blocks, with what
makes the embedding. Lists that hand on directly to each other go together, as the parts of a residual network do, of
which each begins with
a block that changes the form. Where no list keeps the form, all of them are stacks. A list of which nothing is read
(the images of a model that is shown text
alone) is none: it stands with what begins the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.trace_log import TraceLog
from meshwright.core.errors import InputError


def params_by_layer(model: nn.Module, graph: ModelGraph) -> list[tuple[str, list[str]]]:
    """(layer, parameter names) in forward order; layers without parameters are left out.

    'embedding' is the vocabulary embedding alone, 'front' what else comes before the blocks, 'back' what comes after
    them but for 'head',
    the vocabulary head. Where blocks are numbered over several stacks, 'between.N' is what follows block N, the last of
    its stack. A model
    without a list of blocks has a block for each child with parameters.
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
    """Raises InputError for a block that stands in a list twice."""
    for path in lists:
        first: dict[int, str] = {}
        for name, block in model.get_submodule(path)._modules.items():
            if first.setdefault(id(block), name) != name:
                raise InputError(
                    f"{path}.{name} is {path}.{first[id(block)]} itself, and a block has one place: copy it (copy.deepcopy), or call it twice in one block"
                )


def find_block_lists(model: nn.Module) -> list[str]:
    """Paths of the outermost lists of like modules; modules of several kinds count when the list holds nothing but
    blocks. A list of lists is none: what is
    never called is no block."""
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
    """The one with most parameters, of those that ran: text may be read without the images that go with it."""
    ran = [path for path in stacks if seen is not None and any(block.startswith(f"{path}.") for block in seen.blocks)]
    return max(
        ran or stacks, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters())
    )


def is_list_used(path: str, seen: TraceLog | None) -> bool:
    """Whether anything in the list at `path` was read: images are not, where a model that sees is shown text alone."""
    return seen is None or any(name.startswith(f"{path}.") for name in seen.order)


def block_stacks(lists: Sequence[str], seen: TraceLog | None) -> list[str]:
    """Those of `lists` that are stacks, in the order in which they run; one whose blocks were not seen to run, though
    its weights
    were read, is one, behind the others."""
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
    """What is first used behind a stack's last block and before the next one's; `stacks` in the order in which they
    run.

    >>> params_between_stacks(["one", "two"], {"table": 0, "one.0.weight": 1, "norm.weight": 2, "two.0.weight": 3, "last": 4})
    (('norm.weight',),)
    """
    ends = [max((place for name, place in order.items() if name.startswith(f"{path}.")), default=-1) for path in stacks]
    outside = {name: place for name, place in order.items() if not any(name.startswith(f"{path}.") for path in stacks)}
    return tuple(
        tuple(name for name, place in outside.items() if end < place < following) for end, following in pairwise(ends)
    )
