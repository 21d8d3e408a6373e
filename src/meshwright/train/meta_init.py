"""Builds models on the meta device and loads their weights from files: each rank reads only its own shards, so no rank
stores the whole model. `Trainer.load_weights` and the training loop use it.

    with init_on_meta():                                # parameters are shapes only; buffers are real
        model = AutoModelForCausalLM.from_config(config)
    trainer = parallelize(model, optimizer, plan)
    trainer.load_weights(folder)                        # safetensors; every rank reads its own rows and columns

Guarantees: the result equals training after `from_pretrained` on one device. A parameter that was not loaded is NaN,
not zero, and a step before `load_weights` is refused. Buffers in the file (running means, router corrections) are
loaded. The model's own code computes the other buffers (rotary frequencies, masks).

For some Hugging Face model families, tensors have other names or shapes in files than in the modules. Then the
conversion rules of the `transformers` library are translated to `WeightSource`s. If a key in the file is not the name
of a tensor of the model, all renaming rules are applied to the key. After that, at most one rule may merge the key's
tensor with the tensors of other keys. This rule may concatenate tensors along the first dimension, stack experts along
a new first dimension, or concatenate the tensors of each expert and then stack the experts. Any other conversion raises
InputError. Source: huggingface/transformers, `conversion_mapping.py` and `core_model_loading.rename_source_key`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from meshwright.analysis.nf4 import pack_nf4, weight_shape
from meshwright.checkpoint.hf_weights import BUFFER_PREFIX, WEIGHT_PREFIX, HfWeights, WeightSource, load_weights
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.storage import is_present
from meshwright.runtime import state_dict
from meshwright.runtime.engine import Engine
from meshwright.runtime.state_dict import LocalPiece
from meshwright.spec.layout import NF4_BLOCK_BYTES, NF4_BLOCK_NUMEL


class KeyMapping(NamedTuple):
    """How a file key maps to the model. `name`: the tensor's name in the model. `rule`: the rule of `transformers` that
    merges the tensor with those of other keys, or None. `part`: the source pattern of this rule that matches the
    key."""

    name: str
    rule: Any = None
    part: str = ""


def weight_sources(weights: HfWeights, model: nn.Module, known: Collection[str]) -> dict[str, WeightSource]:
    """Returns, by name, where to read those tensors of `model` that are stored under other names or in several pieces.
    `known`: the names of the model's tensors. Raises InputError if a conversion is not supported (module docstring)."""
    rules = _conversion_rules(model)
    groups: dict[str, dict[str, list[str]]] = {}
    joined: dict[str, Any] = {}
    for key in sorted(weights.entries, key=_natural_order):
        if key in known:
            continue
        found = _map_key(key, rules)
        name = _match_prefix(found.name, str(getattr(model, "base_model_prefix", "")), known)
        groups.setdefault(name, {}).setdefault(found.part, []).append(key)
        joined[name] = found.rule
    return {
        name: _build_source(weights, joined[name], parts)
        for name, parts in groups.items()
        if name in known and name not in weights.entries
    }


def _conversion_rules(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules:  # the model does not use transformers, and importing it takes seconds
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def _map_key(key: str, rules: list[Any]) -> KeyMapping:
    name = key
    for rule in rules:
        if not hasattr(rule, "operations"):
            name = rule.rename_source_key(name)[0]
    for rule in rules:
        if hasattr(rule, "operations"):
            found, part = rule.rename_source_key(name)
            if part:
                return KeyMapping(found, rule, part)
    return KeyMapping(name)


def _match_prefix(name: str, prefix: str, known: Collection[str]) -> str:
    """Adds the prefix of the base model (such as `model.`) to a key or removes it, if the result is in `known`. The
    file and the model differ in the prefix if only one of them has an output head."""
    if name in known or not prefix:
        return name
    return next((other for other in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if other in known), name)


def _build_source(weights: HfWeights, rule: Any, parts: dict[str, list[str]]) -> WeightSource:
    first = next(iter(parts.values()))[0]
    if rule is None:
        return WeightSource(((first,),))
    steps = [type(step).__name__ for step in rule.operations]
    stacked = "MergeModulelist" in steps
    columns = [parts[part] for part in rule.source_patterns if part in parts]
    plain = steps in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"])
    where = [step.dim for step in rule.operations] == [0, 1][: len(steps)] if plain else False
    if not where or len(rule.target_patterns) > 1 or len({len(column) for column in columns}) > 1:
        raise InputError(
            Message(
                "{path}: {first!r} has a layout that is not supported ({steps}); convert it once with transformers: "
                "from_pretrained(...).save_pretrained(..., save_original_format=False)",
                path=weights.path,
                first=first,
                steps=", ".join(steps),
            )
        )
    rows = tuple(zip(*columns, strict=True)) if stacked else (tuple(key for column in columns for key in column),)
    return WeightSource(rows, stacked)


def _natural_order(key: str) -> list[tuple[int, str]]:
    """Returns a sort key by numeric value: expert 10 comes after 9.

    >>> sorted(["e.10.w", "e.9.w"], key=_natural_order)
    ['e.9.w', 'e.10.w']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


LORA_BASE_INFIX = ".base_layer."
"""The infix that LoRA inserts into the name of a wrapped layer's weight. Names in weight files lack it."""
IGNORED_BUFFER_PATTERNS = (
    r"rotary_emb\.inv_freq$",
    r"position_ids$",
    r"\.attn\.(masked_)?bias$",
    r"num_batches_tracked$",
)
"""Patterns of buffers that files of earlier `transformers` versions contain. If the model has no such buffer, its key
in the file is ignored."""


@contextmanager
def init_on_meta() -> Iterator[None]:
    """A context in which new modules get parameters on the meta device, with shapes and dtypes only. Buffers are real
    tensors."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def load_sharded_weights(engine: Engine, path: Path | str) -> None:
    """Loads every uninitialized parameter of `engine` from `path`, a checkpoint or a folder with safetensors files.
    From safetensors files it also loads the persistent buffers that they contain. All ranks call it. Raises InputError
    if the files do not match the model."""
    weights = None if is_present(Path(path) / MANIFEST_FILE) else _open_checked_weights(path, engine)
    engine.zero.quiesce()
    # With DiLoCo, each replica has its own weights, but all replicas start from the weights in the file.
    pieces = map(state_dict.strip_replica_prefix, state_dict.weight_pieces(engine, saving=False))
    stored = (item for item in pieces if item.piece.name.removeprefix(WEIGHT_PREFIX) in engine.unfilled)
    named = [(item.piece._replace(name=item.piece.name.replace(LORA_BASE_INFIX, ".")), item.data) for item in stored]
    with torch.no_grad():
        load_weights(path, (item for item in named if item[1].dtype != torch.uint8), weights)
        for piece, data in named:
            if data.dtype == torch.uint8:
                _load_quantized(path, weights, LocalPiece(piece, data), getattr(torch, engine.recipe.compute))
        for unit in engine.zero.units:
            unit.copy_to_params()
            unit.weights.all_gather().wait()
        if engine.outer is not None:
            engine.outer.restart()
    if weights is not None:
        _load_buffers(engine, weights)
    engine.mark_initialized()


def _load_quantized(path: Path | str, weights: HfWeights | None, local: LocalPiece, compute: torch.dtype) -> None:
    """Reads the weights whose bytes `local` stores, and converts them in the wider dtype of float32 and `compute`
    (analysis/nf4.py). A piece may begin and end inside of a block, so whole blocks are read."""
    piece, data = local
    first, last = piece.start // NF4_BLOCK_BYTES, -(-piece.stop // NF4_BLOCK_BYTES)
    ranges = tuple((_columns(start), _columns(stop)) for start, stop in piece.intervals)
    read = piece._replace(
        shape=tuple(weight_shape(piece.shape)),
        dtype="float32",
        intervals=ranges if piece.split == 1 else piece.intervals,
        start=first * NF4_BLOCK_NUMEL,
        stop=last * NF4_BLOCK_NUMEL,
    )
    dtype = torch.promote_types(torch.float32, compute)
    values = torch.empty(read.stop - read.start, dtype=dtype, device=data.device)
    load_weights(path, [(read, values)], weights)
    offset = piece.start - first * NF4_BLOCK_BYTES
    data.copy_(pack_nf4(values.view(1, -1)).view(-1)[offset : offset + len(data)])


def _columns(row_bytes: int) -> int:
    return row_bytes // NF4_BLOCK_BYTES * NF4_BLOCK_NUMEL


def _open_checked_weights(path: Path | str, engine: Engine) -> HfWeights:
    """Opens the weights at `path` and checks their names and shapes against the unsharded model. Every rank makes the
    same check, so all ranks raise the same InputError."""
    weights = HfWeights(path)
    shapes = {
        name.replace(LORA_BASE_INFIX, "."): weight_shape(shape) if engine.shards.params[name].is_packed else shape
        for name, shape in engine.shapes.items()
        if name in engine.unfilled
    }
    others = {name.replace(LORA_BASE_INFIX, ".") for name in (*engine.extra_state.shared_names, *engine.shards.buffers)}
    weights.sources = weight_sources(weights, engine.model, shapes.keys() | others)
    weights.check(
        shapes,
        others,
        [*IGNORED_BUFFER_PATTERNS, *(getattr(engine.model, "_keys_to_ignore_on_load_unexpected", None) or ())],
    )
    return weights


@torch.no_grad()
def _load_buffers(engine: Engine, weights: HfWeights) -> None:
    """Loads those persistent buffers of this rank's modules that are in the files. If a buffer is sharded, only this
    rank's shard is loaded. Raises InputError if a shape differs."""
    for piece, data in state_dict.buffer_pieces(engine, saving=False):
        name = piece.name.removeprefix(BUFFER_PREFIX)
        found = weights.read_full(name.replace(LORA_BASE_INFIX, "."))
        if found is None:
            continue
        if tuple(found.shape) != piece.shape:
            raise InputError(
                Message(
                    "{path}: {name} has shape {shape}, this model's is {model_shape}",
                    path=weights.path,
                    name=name,
                    shape=list(found.shape),
                    model_shape=list(piece.shape),
                )
            )
        if piece.split is not None:
            found = torch.cat(
                [found.narrow(piece.split, first, end - first) for first, end in piece.intervals], piece.split
            )
        data.copy_(found.reshape(-1))
