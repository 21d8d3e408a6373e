"""What kind of rule an optimizer follows, found out by trying it on a few small tensors before anything is sharded.

An optimizer is **elementwise** when what it does to an element depends on that element alone (AdamW, SGD): then it can
be given any run of a
flat buffer. It is **by tensor** when it depends on the one tensor (Muon's matrices, Adafactor's factors and norms):
then whole tensors are
gathered for it. Matrices of blocks and all else are tried by themselves: Muon with AdamW beside it is by tensor for the
former alone.
Anything else (a norm over all tensors, a closure) would be silently wrong on a part of the model, and is refused.

The trial: two steps on the same numbers, once as whole tensors, once as flat runs cut in two, once each tensor by
itself; float64. Each group
of the optimizer (groups.py) has tensors of every kind and number of dimensions that it has of the model.

[Note: rules of others] A rule that is not torch's may change with the size of a tensor (factors from 128 rows on), of a
gradient (a norm that is clipped), or
with the number of steps (a start without preconditioner). It is tried further: over many steps whose gradients are
small and large, and on tensors as large as
the model's up to LARGE elements; each tensor, or run, by itself in a step (few.py), whole ones made of zeros, as they
are given in training.
What begins after LONG steps, or above these sizes, is not seen.

[Note: fused on cores] torch leaves its fused kernels out unless they are asked for. On a core they read and write each
element once: 20 million
elements of AdamW took 12 ms in runs that stay in the cache where the loop over operations took 31. Whoever says
neither `fused` nor `foreach` has left the choice to us; results are those of the loop within rounding. That rounding is
another behind the last
full vector of a run, and runs end at multiples of ALIGN, which every vector divides: an element is rounded alike
wherever it lies, and sums
that are exact under every plan go through the same kernels. On CUDA torch would take one launch for each operation of
all tensors, but not for
runs, which are parameters of a kind of their own; the fused kernel does not ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.runtime.backend import backend_of
from meshwright.runtime.optim.param_groups import FullParam, ParamGroups, first_line, step_subsets
from meshwright.runtime.shard.optimizer_shard import ShardParam
from meshwright.spec.constraints import UpdateProperties, update_violations
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe

RELATIVE_TOLERANCE = 1e-6
"""Of what the steps changed: two orders of the same operations differ by roundings, two rules by more."""

KIND_MATRIX, KIND_OTHER, KIND_VECTOR = range(3)
_PROBE_SHAPES = {
    KIND_MATRIX: ((6, 8), (9, 5)),
    KIND_OTHER: ((7, 4, 2, 3, 2, 2), (5, 6, 3, 2, 2, 3)),
    KIND_VECTOR: ((11,), (13,)),
}
"""Of matrices of blocks, of all else (embeddings, heads, filters, stacked experts), of vectors: two of each, as an
update of one may depend on another. As many
dimensions of each are taken as the tensor has."""

MAX_PROBE_STEPS, MAX_PROBE_CALLS = 120, 3000
"""Steps over which rules of others are tried, and calls of their steps in all, which bound these where a model has many
groups."""

MAX_PROBE_ELEMENTS = 1 << 16
MAX_LARGE_PROBES = 64
"""Elements of a large sample, and samples at most."""


class ProbeTensor(NamedTuple):
    """A small tensor that stands in the trial for those of its kind and group, one of which is `path`."""

    path: str
    shape: tuple[int, ...]
    kind: int


class UpdateRule(NamedTuple):
    """Which tensors the optimizer needs whole: matrices of blocks, all others."""

    matrices: bool
    others: bool

    def needs_full(self, shape: Sequence[int], in_block: bool) -> bool:
        return self.matrices if tensor_kind(shape, in_block) == KIND_MATRIX else self.others


ELEMENTWISE = UpdateRule(False, False)


def tensor_kind(shape: Sequence[int], in_block: bool) -> int:
    return KIND_VECTOR if len(shape) < 2 else KIND_MATRIX if in_block and len(shape) == 2 else KIND_OTHER


FUSABLE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def enable_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """See [Note: fused on cores]; before its first step."""
    if type(optimizer) not in FUSABLE_OPTIMIZERS:
        return
    for group in optimizer.param_groups:
        open_choice = all(group.get(name) is None for name in ("fused", "foreach")) and not group["differentiable"]
        if (
            open_choice
            and all(each.is_floating_point() for each in group["params"])
            and has_fused_kernel([each.device.type for each in group["params"]])
        ):
            group["fused"] = True


def has_fused_kernel(kinds: Sequence[str]) -> bool:
    """Whether tensors on devices of these kinds have fused kernels in common.

    >>> has_fused_kernel(["cpu", "cpu"]), has_fused_kernel(["cuda"]), has_fused_kernel(["cpu", "cuda"]), has_fused_kernel(["meta"])
    (True, True, False, False)
    """
    return len(set(kinds)) <= 1 and all(backend_of(kind).has_fused_optimizer for kind in kinds)


def check_update_rule(device: str, rule: UpdateRule, recipe: Recipe, plan: Plan) -> None:
    """States in fewer bytes are of an element for each weight; the rest are rules of plans, which the planner knows
    too."""
    if rule != ELEMENTWISE and (recipe.rounds or recipe.eight):
        raise InputError(
            f"precision {recipe.name}: states of {8 if recipe.eight else 16} bits are of an element for each weight, which an optimizer of whole "
            "tensors (Muon, Adafactor) has not: use AdamW, or another precision"
        )
    for fault in update_violations(
        plan, UpdateProperties(recipe, rule != ELEMENTWISE, backend_of(device).memory_is_host)
    ):
        raise InputError(f"plan {plan.name}: {fault.message}")


def probe_update_rule(groups: ParamGroups) -> UpdateRule:
    """Raises InputError when the optimizer is neither elementwise nor by tensor."""
    generator = torch.Generator().manual_seed(0)
    samples = _probe_tensors(groups)
    start, *steps = _random_tensors(samples, generator, 3)
    try:
        whole, _ = _run_probe(groups, samples, start, steps)
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
            alone, _ = _run_probe(groups, samples[one], start[one], [gradients[one] for gradients in steps])
        except Exception as error:
            raise InputError(
                f"the optimizer wants all tensors at once ({first_line(error)}), of which a rank holds a part"
            ) from error
        if not _is_close(start[one], whole[one], alone):
            raise InputError(
                "the optimizer's update of one tensor depends on others, of which a rank holds a part: "
                "use a rule that is elementwise (AdamW, SGD) or by tensor (Muon, Adafactor)"
            )
    for rule in (ELEMENTWISE, UpdateRule(True, False), UpdateRule(False, True)):
        flat = [at for at, each in enumerate(samples) if not rule.needs_full(each.shape, each.kind == KIND_MATRIX)]
        try:
            cut, found = _run_probe(groups, samples, start, steps, flat)
        except Exception:  # a rule that wants matrices says so in its own way
            continue
        if (
            _is_close(start, whole, cut) and len({found[at] for at in flat}) < 2
        ):  # a flat unit has the same states throughout
            break
    else:
        rule = UpdateRule(True, True)
    if not groups.is_custom:
        return rule
    rule = _probe_foreign_rule(groups, samples, min(max(MAX_PROBE_CALLS // len(samples), 8), MAX_PROBE_STEPS), rule)
    large = _large_probe_tensors(groups)
    return _probe_foreign_rule(groups, large, 3, rule) if large else rule


def _probe_foreign_rule(
    groups: ParamGroups, samples: Sequence[ProbeTensor], steps: int, least: UpdateRule
) -> UpdateRule:
    """See [Note: rules of others]. The first rule from `least` on that updates `samples` as they are updated whole and
    at once."""
    start, *gradients = _random_tensors(samples, torch.Generator().manual_seed(1), steps + 1)
    for at, each in enumerate(gradients):
        for gradient in each:
            gradient.mul_((1.0, 1e-4, 1e4, 1.0)[at % 4])
    try:
        whole, _ = _run_probe(groups, samples, start, gradients)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {first_line(error)}") from error
    for rule in (
        least,
        *(UpdateRule(matrices, others) for matrices, others in ((True, False), (False, True), (True, True))),
    ):
        if (least.matrices and not rule.matrices) or (least.others and not rule.others):
            continue
        flat = [at for at, each in enumerate(samples) if not rule.needs_full(each.shape, each.kind == KIND_MATRIX)]
        try:
            cut, _ = _run_probe(groups, samples, start, gradients, flat, one_by_one=True)
        except Exception:
            continue
        if _is_close(start, whole, cut):
            return rule
    raise InputError(
        f"the optimizer's update of one tensor depends on others, of which a rank holds a part, on how many it is given in a step, or on their values when it "
        f"is made: {steps} steps with tensors one by one differ from as many with all at once: use a rule that is elementwise (AdamW, SGD) or by tensor (Muon, Adafactor)"
    )


def _random_tensors(samples: Sequence[ProbeTensor], generator: torch.Generator, count: int) -> list[list[torch.Tensor]]:
    return [
        [torch.randn(each.shape, generator=generator, dtype=torch.float64, device="cpu") for each in samples]
        for _ in range(count)
    ]


def _probe_tensors(groups: ParamGroups) -> list[ProbeTensor]:
    """Two for each kind and number of dimensions of tensors in each group."""
    first: dict[tuple[int, int, int], str] = {}
    for name, shape in groups.shapes.items():
        first.setdefault((tensor_kind(shape, groups.in_block[name]), len(shape), groups.group_of[name]), name)
    return [
        ProbeTensor(name, shape[:dims], kind)
        for (kind, dims, _), name in sorted(first.items())
        for shape in _PROBE_SHAPES[kind]
    ]


def _large_probe_tensors(groups: ParamGroups) -> list[ProbeTensor]:
    """The largest tensor of each kind and number of dimensions in each group, its largest sides halved until it is no
    larger than LARGE."""
    largest: dict[tuple[int, int, int], str] = {}
    for name, shape in groups.shapes.items():
        key = (tensor_kind(shape, groups.in_block[name]), len(shape), groups.group_of[name])
        if key not in largest or math.prod(groups.shapes[largest[key]]) < math.prod(shape):
            largest[key] = name
    found = []
    for (kind, _, _), name in sorted(largest.items())[:MAX_LARGE_PROBES]:
        sides = list(groups.shapes[name])
        while math.prod(sides) > MAX_PROBE_ELEMENTS:
            at = sides.index(max(sides))
            sides[at] = -(-sides[at] // 2)
        if all(sides):
            found.append(ProbeTensor(name, tuple(sides), kind))
    return found


def _run_probe(
    groups: ParamGroups,
    samples: Sequence[ProbeTensor],
    start: Sequence[torch.Tensor],
    steps: Sequence[Sequence[torch.Tensor]],
    flat: Sequence[int] = (),
    one_by_one: bool = False,
) -> tuple[list[torch.Tensor], list[tuple[str, ...]]]:
    """The tensors after the steps, and what states they have; those at `flat` given as two runs each. `apart`: one run
    or tensor in a step of the optimizer,
    whole ones made of zeros."""
    values = [
        torch.zeros_like(each) if one_by_one and at not in flat else each.clone() for at, each in enumerate(start)
    ]
    given: list[list[ShardParam | FullParam]] = []
    for at, (value, sample) in enumerate(zip(values, samples, strict=True)):
        if at in flat:
            given.append(
                [ShardParam(part, value.ndim > 1, sample.path) for part in value.view(-1).split(value.numel() // 2 + 1)]
            )
        else:
            given.append([FullParam(value, sample.path, sample.kind == KIND_MATRIX)])
    optimizer = groups.build_optimizer([parameter for each in given for parameter in each], for_probe=True)
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr") or 1e-2  # a rate of 0 would show nothing
    for value, each in zip(values, start, strict=True):
        value.copy_(each)
    for gradients in steps:
        for held, gradient in zip(given, gradients, strict=True):
            parts = gradient.view(-1).split([each.numel() for each in held])
            for parameter, part in zip(held, parts, strict=True):
                parameter.grad = part.clone().view(parameter.shape)
        if one_by_one:
            _step_each(optimizer, [parameter for held in given for parameter in held])
        else:
            optimizer.step()
    kinds = [
        tuple(sorted(key for key, value in optimizer.state[held[0]].items() if value is not None)) for held in given
    ]
    return [torch.cat([parameter.detach().view(-1) for parameter in held]) for held in given], kinds


def _step_each(optimizer: torch.optim.Optimizer, parameters: Sequence[ShardParam | FullParam]) -> None:
    """One update, a parameter in a step."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with step_subsets(optimizer) as few:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            few([parameter])
            optimizer.step()
            parameter.grad = None


def _is_close(start: Sequence[torch.Tensor], one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = zip((each.view(-1) for each in start), one, other, strict=True)
    return all(
        bool((a - b).norm() <= RELATIVE_TOLERANCE * (a - began).norm() + 1e-14 * began.norm()) for began, a, b in pairs
    )
