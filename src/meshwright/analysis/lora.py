"""Analyses a model with LoRA adapters (peft) as if it had none, then maps the result to the adapted model.
`analyze_model` and the model loader of `meshwright train` use it.

An adapted layer computes y = W x + s B A x. W is the base weight, A (r, in) and B (out, r) are the adapter matrices of
LoRA rank r, and s is a scale. In a column-parallel layer, W and B are split by output features. A is replicated, and
its gradient is partial on each tensor rank, because B is sharded. In a row-parallel layer, W and A are split by input
features, and the outputs of both are summed over ranks. B is replicated. The products that every rank computes have the
small dimension r. A row layer needs one collective more than its base layer, on the r outputs of A. Source: Hu et al.,
LoRA, 2021, section 4.1. Both terms are split as in Shoeybi et al., Megatron-LM, section 3. A layer is adapted if it has
`base_layer`, `lora_A` and `lora_B`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from meshwright.analysis.graph import ModelGraph, TpRegion, TpSplit
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid

BASE_LAYER = "base_layer"


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with LoRA adapters, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if all(name in module._modules for name in (BASE_LAYER, "lora_A", "lora_B"))
    }


@contextmanager
def without_lora(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[None]:
    """Replaces each of `layers` by its base layer. Restores the layers on exit."""
    try:
        for path, layer in layers.items():
            _set_module(model, path, layer.get_submodule(BASE_LAYER))
        yield
    finally:
        for path, layer in layers.items():
            _set_module(model, path, layer)


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


VOCABULARY_ADAPTER_TEXT = mark_msgid(
    "adapters on the vocabulary ({layer}) are not supported: leave it out of the targets"
)


def add_lora_to_graph(model: nn.Module, found: ModelGraph, layers: dict[str, nn.Module]) -> ModelGraph:
    """Returns the graph of the model with adapters. `found` is the graph of the model without adapters.

    Raises:
        InputError: the embedding or the head has an adapter.
    """
    for what in (found.embedding, found.head):
        if what in layers:
            raise InputError(Message(VOCABULARY_ADAPTER_TEXT, layer=what))

    def inside(path: str) -> str:
        return f"{path}.{BASE_LAYER}" if path in layers else path

    def renamed(name: str) -> str:
        path, _, last = name.rpartition(".")
        return f"{inside(path)}.{last}"

    splits = {renamed(name): split for name, split in found.splits.items()}
    partial = [renamed(name) for name in found.partial]
    regions = []
    for region in found.regions:
        adapters = {
            path: sorted(layers[path].get_submodule("lora_A")._modules)
            for path in (*region.columns, *region.rows)
            if path in layers
        }
        for path in adapters.keys() & set(region.columns):
            split = found.splits[f"{path}.weight"]
            for name in adapters[path]:
                splits[f"{path}.lora_B.{name}.weight"] = TpSplit(0, split.parts, split.ways)
                partial.append(f"{path}.lora_A.{name}.weight")
        behind = [f"{path}.lora_A.{name}" for path in region.rows for name in adapters.get(path, ())]
        splits |= {f"{path}.weight": TpSplit(1) for path in behind}
        regions.append(_region_with_lora(region, inside, tuple(behind)))
    names = [name for name, _ in model.named_parameters()]
    # The base weights are frozen, so the numeric checks did not compare their gradients. Only these gradients would
    # show whether a layer outside of the blocks is correct on a slice of the sequence.
    outside = next(
        (
            path
            for path in layers
            if found.stacks and not path.startswith(tuple(f"{block}." for block in found.block_paths))
        ),
        None,
    )
    against = dict(found.unsupported)
    if outside is not None and not found.against_sequence:
        against["sequence"] = Message("the adapter on {outside} is outside of the blocks", outside=outside)
    behind_blocks = {path for path in layers if any(name.rpartition(".")[0] == path for name in found.after_blocks)}
    back = [name for name in names if any(name.startswith(f"{path}.") for path in behind_blocks)]
    return replace(
        found,
        splits=splits,
        regions=tuple(regions),
        partial=tuple(partial),
        after_blocks=tuple(dict.fromkeys((*map(renamed, found.after_blocks), *back))),
        unsupported=against,
        findings=(*found.findings, Message("adapters on {count} layers", count=len(layers))),
        replicated=tuple(name for name in names if name not in splits),
    )


def _region_with_lora(region: TpRegion, inside: Callable[[str], str], behind: tuple[str, ...]) -> TpRegion:
    columns = tuple(map(inside, region.columns))
    entered = tuple(path for path in region.columns if path not in region.inner_columns)
    entries = entered if columns != region.columns and not region.module else ()
    return replace(
        region,
        inner_columns=tuple(map(inside, region.inner_columns)),
        columns=columns,
        rows=(*map(inside, region.rows), *behind),
        entries=entries,
    )
