"""Builds tensor-parallel regions that are declared instead of traced: by the Hugging Face plan of the model, or by
rules of the user (`model.rules` of a job). analyze.py uses the plan only if the model cannot be traced. It adds the
regions of the rules in any case. A region consists of column layers and the row layers that read their outputs.

The plan maps patterns such as 'layers.*.self_attn.q_proj' to 'colwise'. Source: transformers,
`PretrainedConfig.base_model_tp_plan`. Only the plain styles 'colwise' and 'rowwise' are used. With any other style the
region stays unsharded.

A user's rule is verified numerically like any other region. It applies to every block that has all layers of the rule:
`columns` are split by output features, and `rows` by input features. If a rule names unknown or nonlinear layers, has
sizes that do not match, or fails verification, the analysis raises an InputError. Source of the split: Shoeybi et al.,
Megatron-LM (2019), section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from torch import nn

from meshwright.analysis.graph import TpRegion, TpSplit
from meshwright.analysis.layer_rules.rule import is_linear_like, rule_of
from meshwright.analysis.regions import RegionCandidate
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.model import TpRule


def hf_plan_regions(model: nn.Module, blocks: str) -> dict[str, list[RegionCandidate]]:
    """Returns the regions of every block according to the Hugging Face tensor-parallel plan. The lists are empty if the
    model has no plan.
    """
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    patterns = {
        re.compile(re.escape(pattern.partition("*.")[2]).replace(r"\*", "[^.]+") + "$"): style
        for pattern, style in plan.items()
        if isinstance(style, str) and "*" in pattern
    }
    config = getattr(model, "config", None)
    return {
        f"{blocks}.{name}": _block_regions(config, block, f"{blocks}.{name}.", patterns)
        for name, block in model.get_submodule(blocks).named_children()
    }


def _block_regions(
    config: object, block: nn.Module, prefix: str, patterns: dict[re.Pattern[str], str]
) -> list[RegionCandidate]:
    styles = {
        name: style
        for name, module in block.named_modules()
        for pattern, style in patterns.items()
        if isinstance(module, nn.Linear) and pattern.match(name)
    }
    parameter_names = {prefix + name for name, _ in block.named_parameters()}
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in styles):
        mine = {name: style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        columns = tuple(name for name, style in mine.items() if style == "colwise")
        rows = tuple(name for name, style in mine.items() if style == "rowwise")
        if not columns or not rows or len(columns) + len(rows) < len(mine):
            continue
        sizes = _divisible_sizes(config, block, columns)
        dims = [block.get_parameter(f"{name}.weight").shape[0] for name in columns]
        ways = {
            name: (sizes["heads"] * size // max(dims),) if "heads" in sizes else ()
            for name, size in zip(columns, dims, strict=True)
        }
        splits = {
            f"{prefix}{name}.{kind}": TpSplit(0, (), ways[name]) for name in columns for kind in ("weight", "bias")
        }
        splits |= {f"{prefix}{name}.weight": TpSplit(1) for name in rows}
        splits = {name: split for name, split in splits.items() if name in parameter_names}
        columns, rows = (tuple(prefix + name for name in names) for names in (columns, rows))
        region = TpRegion(prefix + parent, columns, rows, sizes.get("heads", 0), sizes.get("kv_heads", 0))
        found.append(RegionCandidate(region, splits, sizes, (), True, frozenset(f"{path}.weight" for path in columns)))
    return found


def _divisible_sizes(config: object, block: nn.Module, columns: tuple[str, ...]) -> dict[str, int]:
    sizes = [block.get_parameter(f"{name}.weight").shape[0] for name in columns]
    heads, kv_heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if len(columns) >= 3 and heads:
        return {"heads": heads, "kv_heads": kv_heads or heads}
    return {"ffn": math.gcd(*sizes)}


USER_RULES_ATTRIBUTE = "_meshwright_rules"
"""Name of the model attribute that contains the user's rules."""


def user_rules_of(model: nn.Module) -> Sequence[TpRule]:
    """Returns the user's rules for `model`."""
    return vars(model).get(USER_RULES_ATTRIBUTE, ())


def propose_user_regions(
    model: nn.Module, blocks: Sequence[str], found: dict[str, list[RegionCandidate]]
) -> dict[str, int]:
    """Adds to `found`, for each rule of the user, a region in each of `blocks` that has the layers of the rule. Returns
    the index of the rule for each weight of a column layer.

    Raises:
        InputError: a rule names unknown or nonlinear layers, has sizes that do not match, or names a layer of a region
            in `found`.
    """
    made: dict[str, int] = {}
    for number, rule in enumerate(user_rules_of(model)):
        chosen = [
            block
            for block in blocks
            if all(_has_module(model, f"{block}.{name}") for name in (*rule.columns, *rule.rows))
        ]
        if not chosen:
            kind = "columns" if any(not _has_module(model, f"{blocks[0]}.{name}") for name in rule.columns) else "rows"
            wrong = next(name for name in (*rule.columns, *rule.rows) if not _has_module(model, f"{blocks[0]}.{name}"))
            known = [path for path, module in model.get_submodule(blocks[0]).named_modules() if is_linear_like(module)]
            raise InputError(
                Message(
                    "model.rules[{number}].{kind}: {wrong!r} is not a layer of the block {blocks}{hint}; it has "
                    "{known}",
                    number=number,
                    kind=kind,
                    wrong=wrong,
                    blocks=blocks[0],
                    hint=did_you_mean(wrong, known),
                    known=", ".join(known),
                )
            )
        for block in chosen:
            one = _region_of_rule(model, block, rule, f"model.rules[{number}]")
            taken = {path for other in found.get(block, ()) for path in (*other.region.columns, *other.region.rows)}
            double = next((path for path in (*one.region.columns, *one.region.rows) if path in taken), None)
            if double is not None:
                raise InputError(
                    Message(
                        "model.rules[{number}]: {double} is already sharded without a rule: remove this rule",
                        number=number,
                        double=double,
                    )
                )
            found.setdefault(block, []).append(one)
            made |= dict.fromkeys(one.weights, number)
    return made


def check_user_rules(made: Mapping[str, int], whole: Mapping[str, str]) -> None:
    """Checks that numeric verification accepted every rule. `made` maps each column weight to the index of its rule.
    `whole` maps each unsharded weight to the reason.

    Raises:
        InputError: verification rejected a rule.
    """
    for weight, number in made.items():
        if weight in whole:
            raise InputError(
                Message(
                    "model.rules[{number}]: {weight} cannot be sharded in this way: {whole}; leave the rule out",
                    number=number,
                    weight=weight.removesuffix(".weight"),
                    whole=whole[weight],
                )
            )


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _region_of_rule(model: nn.Module, block: str, rule: TpRule, where: str) -> RegionCandidate:
    columns, rows = (tuple(f"{block}.{name}" for name in names) for names in (rule.columns, rule.rows))
    for path in (*columns, *rows):
        layer = model.get_submodule(path)
        if not is_linear_like(layer):
            raise InputError(
                Message(
                    "{where}: {path} is a {type}, not a linear layer", where=where, path=path, type=type(layer).__name__
                )
            )
    turned = {path: rule_of(model.get_submodule(path)).output_dim for path in (*columns, *rows)}
    given = {path: model.get_parameter(f"{path}.weight").shape[turned[path]] for path in columns}
    read = {path: model.get_parameter(f"{path}.weight").shape[1 - turned[path]] for path in rows}
    odd = next(((row, size) for row, size in read.items() if size not in given.values()), None)
    if odd is not None:
        gives = ", ".join(f"{path} gives {size}" for path, size in given.items())
        raise InputError(
            Message(
                "{where}: {layer} reads {features} features, but {gives}: a row layer must read the output of a "
                "column layer",
                where=where,
                layer=odd[0],
                features=odd[1],
                gives=gives,
            )
        )
    splits = {f"{path}.weight": TpSplit(turned[path]) for path in columns} | {
        f"{path}.weight": TpSplit(1 - turned[path]) for path in rows
    }
    splits |= {
        f"{path}.bias": TpSplit(0) for path in columns if model.get_submodule(path)._parameters.get("bias") is not None
    }
    weights = frozenset(f"{path}.weight" for path in columns)
    return RegionCandidate(TpRegion("", columns, rows), splits, {"ffn": math.gcd(*given.values())}, (), True, weights)
