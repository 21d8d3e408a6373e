"""A model's parameters in the layers that pipelines cut between and ZeRO-3 gathers: embedding, front, blocks, back, head.

Promise: every parameter stands in exactly one layer, tied ones where they are first used (the embedding).
"""

from __future__ import annotations

from torch import nn

from meshwright.anatomy.nouns import Anatomy


def layers(model: nn.Module, anatomy: Anatomy) -> list[tuple[str, list[str]]]:
    """(layer, parameter names) in forward order; layers without parameters are left out.

    'embedding' is the vocabulary embedding alone, 'front' what else comes before the blocks, 'back' what comes after them but for 'head',
    the vocabulary head. A model without a list of blocks has a block for each child with parameters.
    """
    named = dict(model.named_parameters())
    if anatomy.blocks is None:
        children = dict.fromkeys(name.partition(".")[0] for name in named)
        return [(f"block.{index}", [n for n in named if n.partition(".")[0] == child]) for index, child in enumerate(children)]
    found: dict[str, list[str]] = {"embedding": [], "front": []}
    found.update({f"block.{index}": [] for index in range(anatomy.count)})
    found.update({"back": [], "head": []})
    embedded = model.get_submodule(anatomy.embedding).weight if anatomy.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(anatomy.head).parameters()} if anatomy.head else set()
    prefix = anatomy.blocks + "."
    back = set(anatomy.back)
    places = {name: place for place, (name, _) in enumerate(model.get_submodule(anatomy.blocks).named_children())}
    past = False
    for name, parameter in named.items():
        inside = name.startswith(prefix)
        past = past or inside
        if parameter is embedded:
            found["embedding"].append(name)
        elif inside:
            found[f"block.{places[name[len(prefix) :].partition('.')[0]]}"].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in back or (anatomy.embedding is None and past):
            found["back"].append(name)
        else:
            found["front"].append(name)
    return [(layer, names) for layer, names in found.items() if names]
