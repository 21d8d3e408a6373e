"""Reads the tensor-parallel plan that many Hugging Face models carry: patterns such as 'layers.*.self_attn.q_proj': 'colwise'.

Source: transformers, `PretrainedConfig.base_model_tp_plan`. Only its plain styles are read; any other leaves the region whole.
"""

from __future__ import annotations

import math
import re

from torch import nn

from meshwright.anatomy.nouns import Region, Split
from meshwright.anatomy.regions import Found


def published_regions(model: nn.Module, blocks: str) -> dict[str, list[Found]]:
    """The regions of every block; empty lists where there is no plan."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    patterns = {
        re.compile(re.escape(pattern.partition("*.")[2]).replace(r"\*", "[^.]+") + "$"): style
        for pattern, style in plan.items()
        if isinstance(style, str) and "*" in pattern
    }
    config = getattr(model, "config", None)
    return {
        f"{blocks}.{name}": _regions(config, block, f"{blocks}.{name}.", patterns)
        for name, block in model.get_submodule(blocks).named_children()
    }


def _regions(config: object, block: nn.Module, prefix: str, patterns: dict[re.Pattern[str], str]) -> list[Found]:
    styles = {
        name: style
        for name, module in block.named_modules()
        for pattern, style in patterns.items()
        if isinstance(module, nn.Linear) and pattern.match(name)
    }
    held = {prefix + name for name, _ in block.named_parameters()}
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in styles):
        mine = {name: style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        columns = tuple(name for name, style in mine.items() if style == "colwise")
        rows = tuple(name for name, style in mine.items() if style == "rowwise")
        if not columns or not rows or len(columns) + len(rows) < len(mine):
            continue
        sizes = _sizes(config, block, columns)
        dims = [block.get_parameter(f"{name}.weight").shape[0] for name in columns]
        ways = {name: (sizes["heads"] * size // max(dims),) if "heads" in sizes else () for name, size in zip(columns, dims, strict=True)}
        splits = {f"{prefix}{name}.{kind}": Split(0, (), ways[name]) for name in columns for kind in ("weight", "bias")}
        splits |= {f"{prefix}{name}.weight": Split(1) for name in rows}
        splits = {name: split for name, split in splits.items() if name in held}
        columns, rows = (tuple(prefix + name for name in names) for names in (columns, rows))
        region = Region(prefix + parent, columns, rows, sizes.get("heads", 0), sizes.get("kv_heads", 0))
        found.append(Found(region, splits, sizes, (), True, frozenset(f"{path}.weight" for path in columns)))
    return found


def _sizes(config: object, block: nn.Module, columns: tuple[str, ...]) -> dict[str, int]:
    sizes = [block.get_parameter(f"{name}.weight").shape[0] for name in columns]
    heads, kv_heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if len(columns) >= 3 and heads:
        return {"heads": heads, "kv_heads": kv_heads or heads}
    return {"ffn": math.gcd(*sizes)}
