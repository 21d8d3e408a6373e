"""Reads the tensor-parallel plan that many Hugging Face models carry: patterns such as 'layers.*.self_attn.q_proj': 'colwise'.

Source: transformers, `PretrainedConfig.base_model_tp_plan`. Only its plain styles are read; any other leaves the region whole.
"""

from __future__ import annotations

import math
import re

from torch import nn

from meshwright.anatomy.nouns import Region, Split


def published_columns_and_rows(model: nn.Module, blocks: str, count: int) -> tuple[tuple[Region, ...], dict[str, int], dict[str, Split]]:
    """Regions of a block, sizes to divide and splits of all blocks; empty where there is no plan."""
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    block = model.get_submodule(f"{blocks}.0")
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if not isinstance(style, str) or "*" not in pattern:
            continue
        inner = pattern.partition("*.")[2]
        expression = re.compile(re.escape(inner).replace(r"\*", "[^.]+") + "$")
        styles.update({name: style for name, module in block.named_modules() if expression.match(name) and isinstance(module, nn.Linear)})
    regions, divisible, splits = [], {}, {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in styles):
        mine = {name: style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        columns = tuple(name for name, style in mine.items() if style == "colwise")
        rows = tuple(name for name, style in mine.items() if style == "rowwise")
        if not columns or not rows or len(columns) + len(rows) < len(mine):
            continue
        regions.append(Region(parent, columns, rows))
        divisible.update(_counts(config, block, columns, rows))
        for index in range(count):
            for name in columns:
                splits[f"{blocks}.{index}.{name}.weight"] = Split(0)
                if block.get_submodule(name).bias is not None:
                    splits[f"{blocks}.{index}.{name}.bias"] = Split(0)
            splits.update({f"{blocks}.{index}.{name}.weight": Split(1) for name in rows})
    return tuple(regions), divisible, splits


def _counts(config: object, block: nn.Module, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, int]:
    sizes = [int(block.get_submodule(name).weight.shape[0]) for name in columns]  # type: ignore[union-attr, index, arg-type, operator]
    heads, kv_heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if len(columns) >= 3 and heads:
        return {"heads": heads, "kv_heads": kv_heads or heads}
    return {"ffn": math.gcd(*sizes)}
