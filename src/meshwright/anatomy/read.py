"""Understands a model by its structure: the repeated blocks, the vocabulary embedding and head, the regions that tensor ranks share.

Rule: the blocks are the list of like modules with most parameters; everything else comes from one run on the meta device (trace.py), and
regions are proven with numbers (prove.py). A model that cannot run there falls back on the tensor-parallel plan that Hugging Face models
carry (`base_model_tp_plan`), and without one to replication. `understood` says in words what was found and what was not.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.anatomy.nouns import Anatomy, Split
from meshwright.anatomy.prove import Proof, lent
from meshwright.anatomy.published import published_regions
from meshwright.anatomy.regions import Found, regions_of_block
from meshwright.anatomy.trace import Trace, trace


def read(model: nn.Module, lend: bool = False) -> Anatomy:
    """What `model` is made of. Leaves it as it was.

    `lend`: parameters without memory are lent numbers as far as the proof needs them (the first block and what lies outside of all blocks).
    """
    names = tuple(name for name, _ in model.named_parameters())
    blocks = find_blocks(model)
    if blocks is None:
        return Anatomy(understood=("no list of repeated modules: nothing to cut or to shard",), replicated=names)
    count = len(list(model.get_submodule(blocks).children()))
    said = [f"{count} blocks in {blocks}"]
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        said.append("no vocabulary embedding: tensor parallelism has no rule for it")
        return Anatomy(blocks, count, understood=tuple(said), replicated=names)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        seen = _trace(model, blocks, said)
        outline = _run_outline(model, blocks, seen) if seen else _declared_outline(model, blocks)
        found = _blocks_alike(model, blocks, count, seen, said)
        with lent(model, blocks) if lend else nullcontext():
            found = _proven(model, blocks, found, outline, said)
        return _anatomy(model, blocks, count, outline, found, said)
    finally:
        for module, training in modes:
            module.training = training


def find_blocks(model: nn.Module) -> str | None:
    """Path of the list of like modules that holds most parameters; of nested ones the outermost."""
    best, most = None, 0
    for name, module in model.named_modules():
        children = list(module.children())
        if not name or not isinstance(module, nn.ModuleList | nn.Sequential) or not children:
            continue
        alike = len({type(child) for child in children}) == 1 and any(True for _ in children[0].children())
        numel = sum(parameter.numel() for parameter in module.parameters())
        if alike and numel > most:
            best, most = name, numel
    return best


@dataclass(frozen=True)
class Outline:
    """What lies around the blocks: paths of the embedding and the head, names of the parameters behind the blocks."""

    embedding: str | None
    head: str | None
    back: tuple[str, ...]


def _trace(model: nn.Module, blocks: str, said: list[str]) -> Trace | None:
    """One run in the model's own types, or in bfloat16, which some kernels ask for."""
    try:
        return trace(model, blocks)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    try:
        return trace(model, blocks, torch.bfloat16)
    except Exception:
        said.append(f"it does not run on token ids alone ({reason})")
        return None


def _run_outline(model: nn.Module, blocks: str, seen: Trace) -> Outline:
    sizes = {name: parameter.shape[0] for name, parameter in model.named_parameters() if parameter.ndim}
    heads = [weight for weight, size in seen.outside if size == sizes[weight]]
    pairs = [(e, h) for e in seen.embeddings for h in reversed(heads) if sizes[h] == sizes[e]]
    embedding, head = pairs[0] if pairs else (next(iter(seen.embeddings), None), None)
    last = max((place for name, place in seen.order.items() if name.startswith(blocks + ".")), default=-1)
    back = tuple(name for name, place in seen.order.items() if place > last and not name.startswith(blocks + "."))
    return Outline(_owner(model, embedding, nn.Embedding) if embedding else None, _owner(model, head, nn.Linear) if head else None, back)


def _declared_outline(model: nn.Module, blocks: str) -> Outline:
    """Without a run: what the model itself names, and the order in which modules were registered."""
    names = [name for name, _ in model.named_parameters()]
    last = max(index for index, name in enumerate(names) if name.startswith(blocks + "."))
    embedding, head = (getattr(model, method, lambda: None)() for method in ("get_input_embeddings", "get_output_embeddings"))
    paths = {id(module): path for path, module in model.named_modules()}
    return Outline(
        paths.get(id(embedding)) if isinstance(embedding, nn.Embedding) else None,
        paths.get(id(head)) if isinstance(head, nn.Linear) else None,
        tuple(names[last + 1 :]),
    )


def _owner(model: nn.Module, weight: str, kind: type[nn.Module]) -> str | None:
    """Path of the module of that kind which holds the parameter `weight`, also where it is tied."""
    wanted = model.get_parameter(weight)
    return next(
        (path for path, module in model.named_modules() if isinstance(module, kind) and module._parameters.get("weight") is wanted), None
    )


def _blocks_alike(model: nn.Module, blocks: str, count: int, seen: Trace | None, said: list[str]) -> list[list[Found]]:
    """The regions of every block; none when the blocks differ."""
    left: list[str] = []
    if seen is None:
        found = published_regions(model, blocks)
        said.append("regions from the plan that the model carries" if any(found) else "no tensor-parallel plan: the blocks are replicated")
    else:
        both = [regions_of_block(model, f"{blocks}.{index}", seen) for index in range(count)]
        found, left = [regions for regions, _ in both], both[0][1]
    first = [(one.region, one.counts) for one in found[0]]
    if any([(one.region, one.counts) for one in block] != first for block in found[1:]):
        said.append("the blocks differ in structure: they are not shared")
        return [[] for _ in found]
    said += [str(one) for one in found[0]] + left
    return found


def _proven(model: nn.Module, blocks: str, found: list[list[Found]], outline: Outline, said: list[str]) -> list[list[Found]]:
    """The regions whose shares were seen to sum to the whole."""
    if not found[0] or any(tensor.is_meta for tensor in model.get_submodule(f"{blocks}.0").parameters()):
        return found
    splits = {name: split for one in found[0] for name, split in one.splits.items()}
    vocabulary = model.get_parameter(f"{outline.embedding}.weight").shape[0] if outline.embedding else 0
    try:
        proof = Proof(model, f"{blocks}.0", splits, vocabulary)
    except Exception as error:
        said.append(f"regions are not proven with numbers ({(str(error).splitlines() or [''])[0][:100]})")
        return found
    good = []
    for index, one in enumerate(found[0]):
        objection = proof.objection(one.region, one.counts)
        if objection is None:
            good.append(index)
        else:
            said.remove(str(one))
            said.append(f"{', '.join(one.region.columns)} stay whole: {objection}")
    return [[block[index] for index in good] for block in found]


def _anatomy(model: nn.Module, blocks: str, count: int, outline: Outline, found: list[list[Found]], said: list[str]) -> Anatomy:
    embedding, head = outline.embedding, outline.head
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    splits = {f"{path}.weight": Split(0) for path in (embedding, head) if path}
    if head and model.get_submodule(head)._parameters.get("bias") is not None:
        splits[f"{head}.bias"] = Split(0)
    for one in (one for block in found for one in block):
        splits.update(one.splits)
    splits = _with_aliases(model, splits)
    tied = bool(head and embedding) and model.get_parameter(f"{head}.weight") is model.get_parameter(f"{embedding}.weight")
    said += [f"vocabulary embedding {embedding}" if embedding else "no vocabulary embedding reads the token ids"]
    said += [f"vocabulary head {head}" + (", tied to the embedding" if tied else "")] if head else ["no vocabulary head"]
    return Anatomy(
        blocks,
        count,
        embedding,
        head,
        tied,
        vocabulary=model.get_parameter(f"{embedding}.weight").shape[0] if embedding else 0,
        regions=tuple(one.region for one in found[0]),
        splits=splits,
        divisible={name: size for one in found[0] for name, size in one.counts.items()},
        partial=tuple(name for block in found for one in block for name in one.partial),
        back=tuple(name for name in outline.back if name not in splits),
        against_sequence=_against_sequence(blocks, shapes, splits, found[0]),
        understood=tuple(said),
        replicated=tuple(name for name in shapes if name not in splits),
    )


def _against_sequence(blocks: str, shapes: dict[str, torch.Size], splits: dict[str, Split], found: list[Found]) -> str:
    """A matrix that stays whole inside the blocks may mix places of the sequence, or sees too few of them."""
    whole = next((name for name, shape in shapes.items() if name.startswith(blocks + ".") and len(shape) > 1 and name not in splits), None)
    if whole:
        return f"{whole} stays whole"
    flat = next((one.region.columns[0] for one in found if not one.keeps_sequence), None)
    return f"{flat} reads batch and sequence as one" if flat else ""


def _with_aliases(model: nn.Module, splits: dict[str, Split]) -> dict[str, Split]:
    """`splits` under every name that a shared parameter has."""
    known = {id(model.get_parameter(name)): split for name, split in splits.items()}
    return {name: known[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False) if id(tensor) in known}
