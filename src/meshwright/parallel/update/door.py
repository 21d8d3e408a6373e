"""What kind of rule an optimizer follows, found out by trying it on a few small tensors before anything is sharded.

An optimizer is **elementwise** when what it does to an element depends on that element alone (AdamW, SGD): then it can be given any run of a
flat buffer. It is **by tensor** when it depends on the one tensor (Muon's matrices, Adafactor's factors and norms): then whole tensors are
gathered for it. Matrices of blocks and all else are tried by themselves: Muon with AdamW beside it is by tensor for the former alone.
Anything else (a norm over all tensors, a closure) would be silently wrong on a part of the model, and is refused.

The trial: two steps on the same numbers, once as whole tensors, once as flat runs cut in two, once each tensor by itself; float64. Each group
of the optimizer (groups.py) has tensors of every kind that it has of the model.

[Note: fused on cores] torch leaves its fused kernels out unless they are asked for. On a core they read and write each element once: 20 million
elements of AdamW took 12 ms in runs that stay in the cache where the loop over operations took 31. Whoever says
neither `fused` nor `foreach` has left the choice to us; results are those of the loop within rounding. That rounding is another behind the last
full vector of a run, and runs end at multiples of ALIGN, which every vector divides: an element is rounded alike wherever it lies, and sums
that are exact under every plan go through the same kernels. On CUDA torch would take one launch for each operation of all tensors, but not for
runs, which are parameters of a kind of their own; the fused kernel does not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.base.errors import InputError
from meshwright.parallel.update.groups import Groups, Whole, first_line
from meshwright.parallel.zero.master import Run
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe
from meshwright.spec.rules import Update, update_faults

NEAR = 1e-6
"""Of what the steps changed: two orders of the same operations differ by roundings, two rules by more."""

MATRIX, OTHER, VECTOR = range(3)
_SHAPES = {MATRIX: ((6, 8), (9, 5)), OTHER: ((7, 4), (5, 6)), VECTOR: ((11,), (13,))}
"""Of matrices of blocks, of tables (embeddings, heads), of vectors: two of each, as an update of one may depend on another."""


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
    start, *steps = ([torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in samples] for _ in range(3))
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
            return rule
    return Rule(True, True)


def _samples(groups: Groups) -> list[Sample]:
    """Two for each kind of tensor in each group."""
    first: dict[tuple[int, int], str] = {}
    for name, shape in groups.shapes.items():
        first.setdefault((kind_of(shape, groups.in_block[name]), groups.of[name]), name)
    return [Sample(name, shape, kind) for (kind, _), name in sorted(first.items()) for shape in _SHAPES[kind]]


def _tried(
    groups: Groups,
    samples: Sequence[Sample],
    start: Sequence[torch.Tensor],
    steps: Sequence[Sequence[torch.Tensor]],
    flat: Sequence[int] = (),
) -> tuple[list[torch.Tensor], list[tuple[str, ...]]]:
    """The tensors after the steps, and what states they have; those at `flat` given as two runs each."""
    values = [each.clone() for each in start]
    given: list[list[Run | Whole]] = []
    for at, (value, sample) in enumerate(zip(values, samples, strict=True)):
        if at in flat:
            given.append([Run(part, value.ndim > 1, sample.path) for part in value.view(-1).split(value.numel() // 2 + 1)])
        else:
            given.append([Whole(value, sample.path, sample.kind == MATRIX)])
    optimizer = groups.optimizer([parameter for each in given for parameter in each], anew=True)
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr") or 1e-2  # a rate of 0 would show nothing
    for gradients in steps:
        for held, gradient in zip(given, gradients, strict=True):
            parts = gradient.view(-1).split([each.numel() for each in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = part.clone().view(parameter.shape)
        optimizer.step()
    kinds = [tuple(sorted(key for key, value in optimizer.state[held[0]].items() if value is not None)) for held in given]
    return [torch.cat([parameter.detach().view(-1) for parameter in held]) for held in given], kinds


def _near(start: Sequence[torch.Tensor], one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = zip((each.view(-1) for each in start), one, other, strict=True)
    return all(bool((a - b).norm() <= NEAR * (a - began).norm() + 1e-14 * began.norm()) for began, a, b in pairs)
