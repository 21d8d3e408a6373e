"""What kind of rule an optimizer follows, found out by trying it on a few small tensors before anything is sharded.

An optimizer is **elementwise** when what it does to an element depends on that element alone (AdamW, SGD): then it can be given any run of a
flat buffer. It is **by tensor** when it depends on the one tensor (Muon's matrices, Adafactor's factors and norms): then whole tensors are
gathered for it. Matrices of blocks and all else are tried by themselves: Muon with AdamW beside it is by tensor for the former alone.
Anything else (a norm over all tensors, a closure) would be silently wrong on a part of the model, and is refused.

The trial: two steps on the same numbers, once as whole tensors, once as flat runs cut in two, once each tensor by itself; float64. Each group
of the optimizer (groups.py) has tensors of every kind and number of dimensions that it has of the model.

[Note: rules of others] A rule that is not torch's may change with the size of a tensor (factors from 128 rows on), of a gradient (a norm that is clipped), or
with the number of steps (a start without preconditioner). It is tried further: over many steps whose gradients are small and large, and on tensors as large as
the model's up to LARGE elements; each tensor, or run, by itself in a step (few.py), whole ones made of zeros, as they are given in training.
What begins after LONG steps, or above these sizes, is not seen.

[Note: fused on cores] torch leaves its fused kernels out unless they are asked for. On a core they read and write each element once: 20 million
elements of AdamW took 12 ms in runs that stay in the cache where the loop over operations took 31. Whoever says
neither `fused` nor `foreach` has left the choice to us; results are those of the loop within rounding. That rounding is another behind the last
full vector of a run, and runs end at multiples of ALIGN, which every vector divides: an element is rounded alike wherever it lies, and sums
that are exact under every plan go through the same kernels. On CUDA torch would take one launch for each operation of all tensors, but not for
runs, which are parameters of a kind of their own; the fused kernel does not ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.base.errors import InputError
from meshwright.parallel.update.few import few_of
from meshwright.parallel.update.groups import Groups, Whole, first_line
from meshwright.parallel.zero.master import Run
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe
from meshwright.spec.rules import Update, update_faults

NEAR = 1e-6
"""Of what the steps changed: two orders of the same operations differ by roundings, two rules by more."""

MATRIX, OTHER, VECTOR = range(3)
_SHAPES = {MATRIX: ((6, 8), (9, 5)), OTHER: ((7, 4, 2, 3, 2, 2), (5, 6, 3, 2, 2, 3)), VECTOR: ((11,), (13,))}
"""Of matrices of blocks, of all else (embeddings, heads, filters, stacked experts), of vectors: two of each, as an update of one may depend on another. As many
dimensions of each are taken as the tensor has."""

LONG, CALLS = 120, 3000
"""Steps over which rules of others are tried, and calls of their steps in all, which bound these where a model has many groups."""

LARGE = 1 << 16
MOST = 64
"""Elements of a large sample, and samples at most."""


class Sample(NamedTuple):
    """A small tensor that stands in the trial for those of its kind and group, one of which is `path`."""

    path: str
    shape: tuple[int, ...]
    kind: int


class Rule(NamedTuple):
    """Which tensors the optimizer needs whole: matrices of blocks, all others."""

    matrices: bool
    others: bool

    def needs(self, shape: Sequence[int], in_block: bool) -> bool:
        return self.matrices if kind_of(shape, in_block) == MATRIX else self.others


ELEMENTWISE = Rule(False, False)


def kind_of(shape: Sequence[int], in_block: bool) -> int:
    return VECTOR if len(shape) < 2 else MATRIX if in_block and len(shape) == 2 else OTHER


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """See [Note: fused on cores]; before its first step."""
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        open_choice = all(group.get(name) is None for name in ("fused", "foreach")) and not group["differentiable"]
        if (
            open_choice
            and all(each.is_floating_point() for each in group["params"])
            and can_fuse([each.device.type for each in group["params"]])
        ):
            group["fused"] = True


def can_fuse(kinds: Sequence[str]) -> bool:
    """Whether tensors on devices of these kinds have fused kernels in common.

    >>> can_fuse(["cpu", "cpu"]), can_fuse(["cuda"]), can_fuse(["cpu", "cuda"]), can_fuse(["meta"])
    (True, True, False, False)
    """
    return set(kinds) <= {"cpu"} or set(kinds) == {"cuda"}


def check_rule(device: str, rule: Rule, recipe: Recipe, plan: Plan) -> None:
    """States in fewer bytes are of an element for each weight; the rest are rules of plans, which the planner knows too."""
    if rule != ELEMENTWISE and (recipe.rounds or recipe.eight):
        raise InputError(
            f"precision {recipe.name}: states of {8 if recipe.eight else 16} bits are of an element for each weight, which an optimizer of whole "
            "tensors (Muon, Adafactor) has not: use AdamW, or another precision"
        )
    for fault in update_faults(plan, Update(recipe, rule != ELEMENTWISE, device == "cpu")):
        raise InputError(f"plan {plan.name}: {fault.message}")


def rule_of(groups: Groups) -> Rule:
    """Raises InputError when the optimizer is neither elementwise nor by tensor."""
    generator = torch.Generator().manual_seed(0)
    samples = _samples(groups)
    start, *steps = _numbers(samples, generator, 3)
    try:
        whole, _ = _tried(groups, samples, start, steps)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {first_line(error)}") from error
    for at, each in enumerate(samples):
        if torch.equal(whole[at], start[at].view(-1)):
            raise InputError(
                f"in two steps the optimizer did not move a tensor of the group of {each.path}: it must update what its param_groups hold"
            )
        one = slice(at, at + 1)
        try:
            alone, _ = _tried(groups, samples[one], start[one], [gradients[one] for gradients in steps])
        except Exception as error:
            raise InputError(f"the optimizer wants all tensors at once ({first_line(error)}), of which a rank holds a part") from error
        if not _near(start[one], whole[one], alone):
            raise InputError(
                "the optimizer's update of one tensor depends on others, of which a rank holds a part: "
                "use a rule that is elementwise (AdamW, SGD) or by tensor (Muon, Adafactor)"
            )
    for rule in (ELEMENTWISE, Rule(True, False), Rule(False, True)):
        flat = [at for at, each in enumerate(samples) if not rule.needs(each.shape, each.kind == MATRIX)]
        try:
            cut, found = _tried(groups, samples, start, steps, flat)
        except Exception:  # a rule that wants matrices says so in its own way
            continue
        if _near(start, whole, cut) and len({found[at] for at in flat}) < 2:  # a flat unit has the same states throughout
            break
    else:
        rule = Rule(True, True)
    if not groups.is_foreign:
        return rule
    rule = _rule_further(groups, samples, min(max(CALLS // len(samples), 8), LONG), rule)
    large = _large_samples(groups)
    return _rule_further(groups, large, 3, rule) if large else rule


def _rule_further(groups: Groups, samples: Sequence[Sample], steps: int, least: Rule) -> Rule:
    """See [Note: rules of others]. The first rule from `least` on that updates `samples` as they are updated whole and at once."""
    start, *gradients = _numbers(samples, torch.Generator().manual_seed(1), steps + 1)
    for at, each in enumerate(gradients):
        for gradient in each:
            gradient.mul_((1.0, 1e-4, 1e4, 1.0)[at % 4])
    try:
        whole, _ = _tried(groups, samples, start, gradients)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {first_line(error)}") from error
    for rule in (least, *(Rule(matrices, others) for matrices, others in ((True, False), (False, True), (True, True)))):
        if (least.matrices and not rule.matrices) or (least.others and not rule.others):
            continue
        flat = [at for at, each in enumerate(samples) if not rule.needs(each.shape, each.kind == MATRIX)]
        try:
            cut, _ = _tried(groups, samples, start, gradients, flat, apart=True)
        except Exception:
            continue
        if _near(start, whole, cut):
            return rule
    raise InputError(
        f"the optimizer's update of one tensor depends on others, of which a rank holds a part, on how many it is given in a step, or on their values when it "
        f"is made: {steps} steps with tensors one by one differ from as many with all at once: use a rule that is elementwise (AdamW, SGD) or by tensor (Muon, Adafactor)"
    )


def _numbers(samples: Sequence[Sample], generator: torch.Generator, count: int) -> list[list[torch.Tensor]]:
    return [[torch.randn(each.shape, generator=generator, dtype=torch.float64, device="cpu") for each in samples] for _ in range(count)]


def _samples(groups: Groups) -> list[Sample]:
    """Two for each kind and number of dimensions of tensors in each group."""
    first: dict[tuple[int, int, int], str] = {}
    for name, shape in groups.shapes.items():
        first.setdefault((kind_of(shape, groups.in_block[name]), len(shape), groups.of[name]), name)
    return [Sample(name, shape[:dims], kind) for (kind, dims, _), name in sorted(first.items()) for shape in _SHAPES[kind]]


def _large_samples(groups: Groups) -> list[Sample]:
    """The largest tensor of each kind and number of dimensions in each group, its largest sides halved until it is no larger than LARGE."""
    largest: dict[tuple[int, int, int], str] = {}
    for name, shape in groups.shapes.items():
        key = (kind_of(shape, groups.in_block[name]), len(shape), groups.of[name])
        if key not in largest or math.prod(groups.shapes[largest[key]]) < math.prod(shape):
            largest[key] = name
    found = []
    for (kind, _, _), name in sorted(largest.items())[:MOST]:
        sides = list(groups.shapes[name])
        while math.prod(sides) > LARGE:
            at = sides.index(max(sides))
            sides[at] = -(-sides[at] // 2)
        if all(sides):
            found.append(Sample(name, tuple(sides), kind))
    return found


def _tried(
    groups: Groups,
    samples: Sequence[Sample],
    start: Sequence[torch.Tensor],
    steps: Sequence[Sequence[torch.Tensor]],
    flat: Sequence[int] = (),
    apart: bool = False,
) -> tuple[list[torch.Tensor], list[tuple[str, ...]]]:
    """The tensors after the steps, and what states they have; those at `flat` given as two runs each. `apart`: one run or tensor in a step of the optimizer,
    whole ones made of zeros."""
    values = [torch.zeros_like(each) if apart and at not in flat else each.clone() for at, each in enumerate(start)]
    given: list[list[Run | Whole]] = []
    for at, (value, sample) in enumerate(zip(values, samples, strict=True)):
        if at in flat:
            given.append([Run(part, value.ndim > 1, sample.path) for part in value.view(-1).split(value.numel() // 2 + 1)])
        else:
            given.append([Whole(value, sample.path, sample.kind == MATRIX)])
    optimizer = groups.optimizer([parameter for each in given for parameter in each], anew=True)
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr") or 1e-2  # a rate of 0 would show nothing
    for value, each in zip(values, start, strict=True):
        value.copy_(each)
    for gradients in steps:
        for held, gradient in zip(given, gradients, strict=True):
            parts = gradient.view(-1).split([each.numel() for each in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = part.clone().view(parameter.shape)
        if apart:
            _step_apart(optimizer, [parameter for held in given for parameter in held])
        else:
            optimizer.step()
    kinds = [tuple(sorted(key for key, value in optimizer.state[held[0]].items() if value is not None)) for held in given]
    return [torch.cat([parameter.detach().view(-1) for parameter in held]) for held in given], kinds


def _step_apart(optimizer: torch.optim.Optimizer, parameters: Sequence[Run | Whole]) -> None:
    """One update, a parameter in a step."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with few_of(optimizer) as few:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            few([parameter])
            optimizer.step()
            parameter.grad = None


def _near(start: Sequence[torch.Tensor], one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = zip((each.view(-1) for each in start), one, other, strict=True)
    return all(bool((a - b).norm() <= NEAR * (a - began).norm() + 1e-14 * began.norm()) for began, a, b in pairs)
