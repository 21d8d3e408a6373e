"""Rules that a person wrote (`model.rules` of a job) beside what was found: they are proposals, proven with the same numbers as any other region.

Rule: `columns` of a block are cut by their outputs, `rows` by their inputs, in every block that has these layers. What a rule names and the model
has not, sizes that do not fit, and a rule that the numbers contradict are one line. Source of the cut: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from meshwright.anatomy.nouns import Region, Split
from meshwright.anatomy.plain import is_plain
from meshwright.anatomy.regions import Found
from meshwright.base.errors import InputError, did_you_mean
from meshwright.spec.rule import Rule

RULES = "_meshwright_rules"
"""Where a model keeps the rules that were written for it."""


def rules_of(model: nn.Module) -> Sequence[Rule]:
    return vars(model).get(RULES, ())


def propose(model: nn.Module, blocks: Sequence[str], found: dict[str, list[Found]]) -> dict[str, int]:
    """`found` with a region for each rule in each block that it names the layers of; the rule's number by column weight."""
    made: dict[str, int] = {}
    for number, rule in enumerate(rules_of(model)):
        chosen = [block for block in blocks if all(_has(model, f"{block}.{name}") for name in (*rule.columns, *rule.rows))]
        if not chosen:
            kind = "columns" if any(not _has(model, f"{blocks[0]}.{name}") for name in rule.columns) else "rows"
            wrong = next(name for name in (*rule.columns, *rule.rows) if not _has(model, f"{blocks[0]}.{name}"))
            known = [path for path, module in model.get_submodule(blocks[0]).named_modules() if is_plain(module)]
            raise InputError(
                f"model.rules[{number}].{kind}: {wrong!r} is no layer of a block ({blocks[0]}){did_you_mean(wrong, known)}; it has {', '.join(known)}"
            )
        for block in chosen:
            one = _region(model, block, rule, f"model.rules[{number}]")
            taken = {path for other in found.get(block, ()) for path in (*other.region.columns, *other.region.rows)}
            double = next((path for path in (*one.region.columns, *one.region.rows) if path in taken), None)
            if double is not None:
                raise InputError(f"model.rules[{number}]: {double} is shared by tensor ranks without a rule: leave it out")
            found.setdefault(block, []).append(one)
            made |= dict.fromkeys(one.weights, number)
    return made


def check(made: Mapping[str, int], whole: Mapping[str, str]) -> None:
    """InputError where the numbers contradicted a rule."""
    for weight, number in made.items():
        if weight in whole:
            raise InputError(
                f"model.rules[{number}]: {weight.removesuffix('.weight')} cannot be cut so: {whole[weight]}; leave the rule out"
            )


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _region(model: nn.Module, block: str, rule: Rule, where: str) -> Found:
    columns, rows = (tuple(f"{block}.{name}" for name in names) for names in (rule.columns, rule.rows))
    for path in (*columns, *rows):
        layer = model.get_submodule(path)
        if not is_plain(layer):
            raise InputError(f"{where}: {path} is a {type(layer).__name__}, not a linear layer")
    turned = {path: int(type(model.get_submodule(path)).__name__ == "Conv1D") for path in (*columns, *rows)}
    given = {path: model.get_parameter(f"{path}.weight").shape[turned[path]] for path in columns}
    read = {path: model.get_parameter(f"{path}.weight").shape[1 - turned[path]] for path in rows}
    odd = next(((row, size) for row, size in read.items() if size not in given.values()), None)
    if odd is not None:
        gives = ", ".join(f"{path} gives {size}" for path, size in given.items())
        raise InputError(f"{where}: {odd[0]} reads {odd[1]} features, but {gives}: a row layer reads what a column layer gives")
    splits = {f"{path}.weight": Split(turned[path]) for path in columns} | {f"{path}.weight": Split(1 - turned[path]) for path in rows}
    splits |= {f"{path}.bias": Split(0) for path in columns if model.get_submodule(path)._parameters.get("bias") is not None}
    weights = frozenset(f"{path}.weight" for path in columns)
    return Found(Region("", columns, rows), splits, {"ffn": math.gcd(*given.values())}, (), True, weights)
