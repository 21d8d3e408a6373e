"""What kind of rule an optimizer follows, found out by trying it on a few small tensors before anything is sharded.

An optimizer is **elementwise** when what it does to an element depends on that element alone (AdamW, SGD): then it can be given any run of a
flat buffer. It is **by tensor** when it depends on the one tensor (Muon's matrices, Adafactor's factors and norms): then whole tensors are
gathered for it. Matrices of blocks and all else are tried by themselves: Muon with AdamW beside it is by tensor for the former alone.
Anything else (a norm over all tensors, a closure) would be silently wrong on a part of the model, and is refused.

The trial: two steps on the same numbers, once as whole tensors, once as flat runs cut in two, once each tensor by itself; float64.

[Note: fused on cores] torch leaves its fused kernels out unless they are asked for. On a core they read and write each element once: 20 million
elements of AdamW took 12 ms in runs that stay in the cache where the loop over operations took 31. Whoever says
neither `fused` nor `foreach` has left the choice to us; results are those of the loop within rounding. That rounding is another behind the last
full vector of a run, and runs end at multiples of ALIGN, which every vector divides: an element is rounded alike wherever it lies, and sums
that are exact under every plan go through the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.zero.master import Run
from meshwright.spec.plan import Offload, Plan
from meshwright.spec.precision import Recipe

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

NEAR = 1e-6
"""Of what the steps changed: two orders of the same operations differ by roundings, two rules by more."""

_SHAPES = ((6, 8), (9, 5), (7, 4), (11,))
"""Two matrices of blocks, a table (embedding or head), a vector."""
_IN_BLOCK = 2


class Whole(nn.Parameter):
    """A whole tensor that an optimizer is given. `in_block`: of a repeated block; matrices elsewhere are embeddings and heads."""

    path: str
    is_matrix: bool
    in_block: bool

    def __new__(cls, data: torch.Tensor, name: str, in_block: bool) -> Whole:
        made = super().__new__(cls, data)
        made.path, made.in_block, made.is_matrix = name, in_block, data.ndim > 1
        return made


class Rule(NamedTuple):
    """Which tensors the optimizer needs whole: matrices of blocks, all others."""

    matrices: bool
    others: bool

    def needs(self, shape: Sequence[int], in_block: bool) -> bool:
        return self.matrices if in_block and len(shape) == 2 else self.others


ELEMENTWISE = Rule(False, False)


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """See [Note: fused on cores]; before its first step."""
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        open_choice = all(group.get(name) is None for name in ("fused", "foreach")) and not group["differentiable"]
        if open_choice and all(each.device.type == "cpu" and each.is_floating_point() for each in group["params"]):
            group["fused"] = True


def check_rule(device: str, rule: Rule, recipe: Recipe, plan: Plan) -> None:
    """States in fewer bytes, or elsewhere, are of an element for each weight; elsewhere in the type of the update."""
    if rule != ELEMENTWISE and (recipe.rounds or recipe.eight):
        raise InputError(
            f"precision {recipe.name}: states of {8 if recipe.eight else 16} bits are of an element for each weight, which an optimizer of whole "
            "tensors (Muon, Adafactor) has not: use AdamW, or another precision"
        )
    kept = [str(what) for what in plan.offload if what is not Offload.activations]
    if device != "cpu" and not recipe.master and kept and all(what.startswith("parameters") for what in kept):
        raise InputError(
            f"plan {plan.name}: in {recipe.name} what is updated is the weights themselves, which wait on the host: add off-optimizer, "
            "so that they are updated there, or use bf16"
        )
    if kept and (rule != ELEMENTWISE or recipe.rounds or recipe.eight):
        what = (
            "an optimizer of whole tensors" if rule != ELEMENTWISE else f"precision {recipe.name}" if recipe.rounds else "states of 8 bits"
        )
        raise InputError(f"plan {plan.name}: {what} cannot wait elsewhere: leave off-{kept[0]} out, or use AdamW with bf16")


def rule_of(make: MakeOptimizer) -> Rule:
    """Raises InputError when the optimizer is neither elementwise nor by tensor."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    steps = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES] for _ in range(2)]
    try:
        whole = _tried(make, start, steps, ())
    except Exception as error:
        raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {_first_line(error)}") from error
    for at in range(len(_SHAPES)):
        try:
            alone = _tried(make, start[at : at + 1], [each[at : at + 1] for each in steps], (), at)
        except Exception as error:
            raise InputError(f"the optimizer wants all tensors at once ({_first_line(error)}), of which a rank holds a part") from error
        if not _near(start[at : at + 1], whole[at : at + 1], alone):
            raise InputError(
                "the optimizer's update of one tensor depends on others, of which a rank holds a part: "
                "use a rule that is elementwise (AdamW, SGD) or by tensor (Muon, Adafactor)"
            )
    for rule in (ELEMENTWISE, Rule(True, False), Rule(False, True)):
        flat = [at for at, shape in enumerate(_SHAPES) if not rule.needs(shape, at < _IN_BLOCK)]
        try:
            if _near(start, whole, _tried(make, start, steps, flat)):
                return rule
        except Exception:  # a rule that wants matrices says so in its own way
            continue
    return Rule(True, True)


def _tried(
    make: MakeOptimizer, start: Sequence[torch.Tensor], steps: Sequence[Sequence[torch.Tensor]], flat: Sequence[int], first: int = 0
) -> list[torch.Tensor]:
    """The tensors after the steps; those at `flat` given as two runs each. `first`: the place of the first one in the table of shapes."""
    values = [each.clone() for each in start]
    given: list[list[nn.Parameter]] = []
    for at, value in enumerate(values):
        if at in flat:
            given.append([Run(part, value.ndim > 1) for part in value.view(-1).split(value.numel() // 2 + 1)])
        else:
            given.append([Whole(value, f"tensor {at}", first + at < _IN_BLOCK)])
    optimizer = make([parameter for each in given for parameter in each])
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr") or 1e-2  # a rate of 0 would show nothing
    for gradients in steps:
        for held, gradient in zip(given, gradients, strict=True):
            parts = gradient.view(-1).split([each.numel() for each in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = part.clone().view(parameter.shape)
        optimizer.step()
    return [torch.cat([parameter.detach().view(-1) for parameter in held]) for held in given]


def _near(start: Sequence[torch.Tensor], one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = zip((each.view(-1) for each in start), one, other, strict=True)
    return all(bool((a - b).norm() <= NEAR * (a - began).norm() + 1e-14 * began.norm()) for began, a, b in pairs)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
