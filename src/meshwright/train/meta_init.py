"""Weights for models on the meta device: each rank reads its own shards, and no rank ever stores the whole model.

    with init_on_meta():                                # parameters are shapes only; buffers are real
        model = AutoModelForCausalLM.from_config(config)
    trainer = parallelize(model, optimizer, plan)
    trainer.load_weights(folder)                        # safetensors; every rank reads its own rows and columns

Guarantees: the result equals training after `from_pretrained` on one device. A parameter that was never loaded is NaN,
not zero, and a step before `load_weights` is refused. Buffers in the file (running means, router corrections) are
loaded. Other buffers (rotary frequencies, masks) are computed by the model's own code.

In some Hugging Face families, tensors have other names or shapes in files than in the modules. For these families the
conversion rules of transformers are turned into `WeightSource`s.

Rule: if the model does not have a key of the file, all renaming rules of the family are applied to the key. Then at
most one rule merges the tensor of this key with others: it concatenates them along the first dimension, or stacks
experts along a new first dimension. Any other conversion raises an error. Source: huggingface/transformers,
`conversion_mapping.py` and `core_model_loading.rename_source_key`.
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

from meshwright.checkpoint.hf_weights import BUFFER_PREFIX, WEIGHT_PREFIX, HfWeights, WeightSource, load_weights
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.storage import is_present
from meshwright.runtime import state_dict
from meshwright.runtime.engine import Engine


class KeyMapping(NamedTuple):
    """How a file key maps to the model: the name there, the rule that merges its tensor with those of other keys, and
    the position of the tensor in that rule."""

    name: str
    rule: Any = None
    part: str = ""


def weight_sources(weights: HfWeights, model: nn.Module, known: Collection[str]) -> dict[str, WeightSource]:
    """Returns sources for the tensors of `model` that have no file key of the same name. `known` has the names of the
    model's tensors."""
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
    if "transformers" not in sys.modules:  # then no model of transformers is in use, and importing it takes seconds
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
    """Adds or removes the prefix of the base model (such as `model.`) in a key. The prefixes differ if only the file,
    or only the model, has an output head."""
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
"""The part of a name that adapters insert for a wrapped layer. Weight files do not have it."""
IGNORED_BUFFER_PATTERNS = (
    r"rotary_emb\.inv_freq$",
    r"position_ids$",
    r"\.attn\.(masked_)?bias$",
    r"num_batches_tracked$",
)
"""Buffers that files of earlier versions of transformers contain. Models compute these buffers themselves."""


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Puts the parameters of modules that are built inside the context on the meta device: they have only shapes and
    dtypes. Buffers are real tensors."""

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
    """Loads every parameter of `engine` that is on the meta device from the weights at `path`. Every rank calls it.
    Raises InputError where the files do not fit."""
    weights = None if is_present(Path(path) / MANIFEST_FILE) else _open_checked_weights(path, engine)
    engine.zero.quiesce()
    # Local SGD replicas all start from the same weights.
    pieces = map(state_dict.strip_replica_prefix, state_dict.weight_pieces(engine, saving=False))
    stored = (item for item in pieces if item.piece.name.removeprefix(WEIGHT_PREFIX) in engine.unfilled)
    named = ((item.piece._replace(name=item.piece.name.replace(LORA_BASE_INFIX, ".")), item.data) for item in stored)
    with torch.no_grad():
        load_weights(path, named, weights)
        for unit in engine.zero.units:
            unit.copy_to_params()
            unit.weights.all_gather().wait()
        if engine.outer is not None:
            engine.outer.restart()
    if weights is not None:
        _load_buffers(engine, weights)
    engine.mark_initialized()


def _open_checked_weights(path: Path | str, engine: Engine) -> HfWeights:
    """Opens the weights at `path` and checks them against the whole model, not only against this rank's shard. So all
    ranks reach the same result."""
    weights = HfWeights(path)
    shapes = {name.replace(LORA_BASE_INFIX, "."): engine.shapes[name] for name in engine.unfilled}
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
    """Loads the persistent buffers of this rank's modules, or this rank's shards of sharded buffers."""
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
