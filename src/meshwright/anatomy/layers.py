"""A model's parameters in the layers that pipelines cut between and ZeRO-3 gathers: embedding, front, blocks, back, head.

Promise: every parameter stands in exactly one layer, tied ones where they are first used (the embedding).
"""

from __future__ import annotations

from torch import nn

from meshwright.anatomy.nouns import Anatomy
from meshwright.base.errors import InputError


def layers(model: nn.Module, anatomy: Anatomy) -> list[tuple[str, list[str]]]:
    """(layer, parameter names) in forward order; layers without parameters are left out.

    'embedding' is the vocabulary embedding alone, 'front' what else comes before the blocks, 'back' what comes after them but for 'head',
    the vocabulary head. Where blocks are numbered over several stacks, 'between.N' is what follows block N, the last of its stack. A model
    without a list of blocks has a block for each child with parameters.
    """
    named = dict(model.named_parameters())
    if anatomy.blocks is None:
        children = dict.fromkeys(name.partition(".")[0] for name in named)
        return [(f"block.{index}", [n for n in named if n.partition(".")[0] == child]) for index, child in enumerate(children)]
    stacks = anatomy.stacks if anatomy.over_stacks else ((anatomy.blocks, anatomy.count),)
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
        name: place for place, names in zip([p for p in found if p.startswith("between.")], anatomy.between, strict=False) for name in names
    }
    found.update({"back": [], "head": []})
    embedded = model.get_submodule(anatomy.embedding).weight if anatomy.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(anatomy.head).parameters()} if anatomy.head else set()
    back = set(anatomy.back)
    past = False
    for name, parameter in named.items():
        block = next((places[name[:end]] for end in range(len(name)) if name[end] == "." and name[:end] in places), None)
        past = past or block is not None
        if parameter is embedded:
            found["embedding"].append(name)
        elif block is not None:
            found[block].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in behind:
            found[behind[name]].append(name)
        elif name in back or (anatomy.embedding is None and past):
            found["back"].append(name)
        else:
            found["front"].append(name)
    return [(layer, names) for layer, names in found.items() if names]


def check_apart(model: nn.Module, lists: list[str]) -> None:
    """Raises InputError for a block that stands in a list twice."""
    for path in lists:
        first: dict[int, str] = {}
        for name, block in model.get_submodule(path)._modules.items():
            if first.setdefault(id(block), name) != name:
                raise InputError(
                    f"{path}.{name} is {path}.{first[id(block)]} itself, and a block has one place: copy it (copy.deepcopy), or call it twice in one block"
                )
