"""Understands a model by its structure: the repeated blocks, the vocabulary embedding and head, the regions that tensor ranks share.

Rule: the blocks are the longest list of like modules by parameters; everything else comes from one run on the meta device (trace.py).
A model that cannot run there falls back on the tensor-parallel plan that Hugging Face models carry (`base_model_tp_plan`), and without
one to replication. `understood` says in words what was found and what was not.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from meshwright.anatomy.nouns import Anatomy, Split
from meshwright.anatomy.published import published_columns_and_rows
from meshwright.anatomy.regions import regions_of_block
from meshwright.anatomy.trace import Trace, trace


def read(model: nn.Module) -> Anatomy:
    """What `model` is made of. Leaves it as it was."""
    blocks = find_blocks(model)
    if blocks is None:
        return Anatomy(understood=("no list of repeated modules: nothing to cut or to shard",), replicated=tuple(_names(model)))
    count = len(list(model.get_submodule(blocks).children()))
    said = [f"{count} blocks in {blocks}"]
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        said.append("no vocabulary embedding: tensor parallelism has no rule for it")
        return Anatomy(blocks, count, understood=tuple(said), replicated=tuple(_names(model)))
    try:
        seen = trace(model, blocks)
    except Exception as error:
        said.append(f"it does not run on token ids alone ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
        return _from_published_plan(model, blocks, count, said)
    return _from_trace(model, blocks, count, seen, said)


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


def _names(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_parameters())


def _vocabulary(model: nn.Module, seen: Trace) -> tuple[str | None, str | None]:
    """Parameter names of the embedding that reads token ids and of the head that is as wide, in the run's order."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    heads = [weight for weight, _, size in seen.outside if size == sizes[weight][0]]
    for embedding in seen.embeddings:
        for head in reversed(heads):
            if sizes[head][0] == sizes[embedding][0]:
                return embedding, head
    return (seen.embeddings[0] if seen.embeddings else None), None


def _owner(model: nn.Module, weight: str, kind: type[nn.Module]) -> str | None:
    """Path of the module of that kind which holds the parameter `weight`, also where it is tied."""
    wanted = model.get_parameter(weight)
    found = [name for name, module in model.named_modules() if isinstance(module, kind) and getattr(module, "weight", None) is wanted]
    return found[0] if found else None


def _with_aliases(model: nn.Module, splits: dict[str, Split]) -> dict[str, Split]:
    """`splits` under every name that a shared parameter has."""
    known = {id(model.get_parameter(name)): split for name, split in splits.items()}
    return {name: known[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False) if id(tensor) in known}


def _vocabulary_splits(model: nn.Module, embedding: str | None, head: str | None) -> dict[str, Split]:
    splits = {f"{path}.weight": Split(0) for path in (embedding, head) if path}
    if head and getattr(model.get_submodule(head), "bias", None) is not None:
        splits[f"{head}.bias"] = Split(0)
    return splits


def _from_trace(model: nn.Module, blocks: str, count: int, seen: Trace, said: list[str]) -> Anatomy:
    embedding_weight, head_weight = _vocabulary(model, seen)
    embedding = _owner(model, embedding_weight, nn.Embedding) if embedding_weight else None
    head = _owner(model, head_weight, nn.Linear) if head_weight else None
    splits = _vocabulary_splits(model, embedding, head)
    found = [regions_of_block(model, f"{blocks}.{index}", seen) for index in range(count)]
    if any(one.regions != found[0].regions or one.divisible != found[0].divisible for one in found):
        said.append("the blocks differ in structure: they are not sharded")
        found = []
    for one in found:
        splits.update(one.splits)
    splits = _with_aliases(model, splits)
    first = found[0] if found else None
    said += first.said if first else []
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    inside = [name for name in shapes if name.startswith(blocks + ".")]
    last = max((seen.order[name] for name in inside if name in seen.order), default=-1)
    tied = head is not None and embedding is not None and model.get_submodule(head).weight is model.get_submodule(embedding).weight
    said += [f"vocabulary embedding {embedding}" if embedding else "no vocabulary embedding reads the token ids"]
    said += [f"vocabulary head {head}" + (", tied to the embedding" if tied else "")] if head else ["no vocabulary head"]
    back = [name for name in shapes if name not in inside and seen.order.get(name, -1) > last and name not in splits]
    return Anatomy(
        blocks,
        count,
        embedding,
        head,
        tied,
        vocabulary=shapes[embedding_weight][0] if embedding_weight else 0,
        regions=first.regions if first else (),
        splits=splits,
        divisible=first.divisible if first else {},
        partial=tuple(name for one in found for name in one.partial),
        back=tuple(back),
        whole_mixers=any(len(shapes[name]) > 1 and name not in splits for name in inside),
        understood=tuple(said),
        replicated=tuple(name for name in shapes if name not in splits),
    )


def _from_published_plan(model: nn.Module, blocks: str, count: int, said: list[str]) -> Anatomy:
    """Without a run: the plan that the model's authors wrote, and the order in which modules were registered."""
    embedding, head = _declared(model, "get_input_embeddings", nn.Embedding), _declared(model, "get_output_embeddings", nn.Linear)
    splits = _vocabulary_splits(model, embedding, head)
    regions, divisible, block_splits = published_columns_and_rows(model, blocks, count)
    splits = _with_aliases(model, {**splits, **block_splits})
    said.append(
        "regions from the plan that the model carries" if regions else "the model carries no tensor-parallel plan: blocks are replicated"
    )
    names = list(_names(model))
    inside = [index for index, name in enumerate(names) if name.startswith(blocks + ".")]
    back = [name for name in names[inside[-1] + 1 :] if name not in splits]
    tied = head is not None and embedding is not None and model.get_submodule(head).weight is model.get_submodule(embedding).weight
    return Anatomy(
        blocks,
        count,
        embedding,
        head,
        tied,
        vocabulary=model.get_parameter(f"{embedding}.weight").shape[0] if embedding else 0,
        regions=regions,
        splits=splits,
        divisible=divisible,
        back=tuple(back),
        whole_mixers=any(model.get_parameter(names[i]).ndim > 1 and names[i] not in splits for i in inside),
        understood=tuple(said),
        replicated=tuple(name for name in names if name not in splits),
    )


def _declared(model: nn.Module, method: str, kind: type[nn.Module]) -> str | None:
    """Path of the module that the model itself names."""
    wanted = getattr(model, method, lambda: None)()
    return next((name for name, module in model.named_modules() if module is wanted and isinstance(module, kind)), None)
