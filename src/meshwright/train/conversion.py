"""Files of a Hugging Face family whose tensors are named or laid otherwise than its modules: transformers' own rules as `Source`s.

Rule: a key that the model has not is renamed by all rules of its family, then laid together by at most one of them: parts along the first
dimension, and experts stacked in front. Any other way to lay tensors is refused in one line, never guessed.
Source: huggingface/transformers, `conversion_mapping.py` and `core_model_loading.rename_source_key`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from meshwright.base.errors import InputError
from meshwright.checkpoint.weights import Source, Weights


class Named(NamedTuple):
    """What a key of a file is called in the model, the rule that joins it with others, and its part in that rule."""

    name: str
    rule: Any = None
    part: str = ""


def sources_of(weights: Weights, model: nn.Module, known: Collection[str]) -> dict[str, Source]:
    """What makes those tensors of `model` (their names are `known`) that no key of the files names."""
    rules = _rules_of(model)
    groups: dict[str, dict[str, list[str]]] = {}
    joined: dict[str, Any] = {}
    for key in sorted(weights.entries, key=_by_number):
        if key in known:
            continue
        found = _renamed(key, rules)
        name = _with_prefix(found.name, str(getattr(model, "base_model_prefix", "")), known)
        groups.setdefault(name, {}).setdefault(found.part, []).append(key)
        joined[name] = found.rule
    return {name: _source(weights, joined[name], parts) for name, parts in groups.items() if name in known and name not in weights.entries}


def _rules_of(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules:  # then none of its models is here; it takes seconds to import
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def _renamed(key: str, rules: list[Any]) -> Named:
    name = key
    for rule in rules:
        if not hasattr(rule, "operations"):
            name = rule.rename_source_key(name)[0]
    for rule in rules:
        if hasattr(rule, "operations"):
            found, part = rule.rename_source_key(name)
            if part:
                return Named(found, rule, part)
    return Named(name)


def _with_prefix(name: str, prefix: str, known: Collection[str]) -> str:
    """A base model's file for a model with a head, or the other way round."""
    if name in known or not prefix:
        return name
    return next((other for other in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if other in known), name)


def _source(weights: Weights, rule: Any, parts: dict[str, list[str]]) -> Source:
    first = next(iter(parts.values()))[0]
    if rule is None:
        return Source(((first,),))
    steps = [type(step).__name__ for step in rule.operations]
    stacked = "MergeModulelist" in steps
    columns = [parts[part] for part in rule.source_patterns if part in parts]
    plain = steps in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"])
    where = [step.dim for step in rule.operations] == [0, 1][: len(steps)] if plain else False
    if not where or len(rule.target_patterns) > 1 or len({len(column) for column in columns}) > 1:
        raise InputError(
            f"{weights.path}: {first!r} is laid in a way that is not read here ({', '.join(steps)}); once, by transformers: "
            "from_pretrained(...).save_pretrained(..., save_original_format=False)"
        )
    rows = tuple(zip(*columns, strict=True)) if stacked else (tuple(key for column in columns for key in column),)
    return Source(rows, stacked)


def _by_number(key: str) -> list[tuple[int, str]]:
    """Experts in the order of their numbers: 10 after 9.

    >>> sorted(["e.10.w", "e.9.w"], key=_by_number)
    ['e.9.w', 'e.10.w']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]
