"""Determines whether an optimizer updates each element or each tensor independently of all others, by running the
optimizer on small tensors. The build runs this probe before it shards the model.

An optimizer is **elementwise** if its update of an element depends only on this element (AdamW, SGD). Such an optimizer
can update any segment of a flat buffer. An optimizer is **by tensor** if the update of an element depends on the whole
tensor of the element, as in Muon and Adafactor. Such an optimizer gets full tensors. Matrices of blocks and all other
tensors are tested separately. For example, Muon combined with AdamW is by tensor only for matrices of blocks. Any other
optimizer (one with a norm over all tensors, or one that needs a closure) is refused. Otherwise its updates of a shard
would be wrong, and no error would show this.

The probe runs two steps in float64 from equal values in three ways: on full tensors, on flat tensors that are each cut
into two segments, and with a separate optimizer for each tensor. Each optimizer group (param_groups.py) gets probe
tensors of the same kinds and numbers of dimensions as its tensors in the model.

[Note: custom rules] An update rule that is not torch's may depend on the size of a tensor (for example, factors only
from 128 rows on) or of a gradient (a clipped norm). It may also depend on the number of steps (first steps without
preconditioner). So two more tests run for such a rule: many steps with small and large gradients, and tensors as large
as the model's, up to MAX_PROBE_ELEMENTS. In these tests each tensor or segment is updated in a separate call of `step`.
Full tensors are zero when the optimizer is created, as in training. An effect that begins only after MAX_PROBE_STEPS
steps, or only in tensors larger than MAX_PROBE_ELEMENTS, is not detected.

[Note: fused on CPU] By default torch does not use its fused kernels. On a CPU, fused kernels read and write each
element only once per update. AdamW took 12 ms for 20 million elements with fused kernels on segments that stay in the
cache, and 31 ms with one loop per operation. If the script sets neither `fused` nor `foreach`, fused kernels are
enabled. Their results equal those of the loop except for rounding. A fused kernel rounds the elements after the last
full SIMD vector of a segment differently from all others. Segments end at multiples of ALIGN_NUMEL, which every vector
length divides, so there are no such elements. Each element therefore rounds identically under every plan, and plans
with exact sums (zero/exact_sum.py) use fused kernels too. On CUDA torch by default launches one kernel per operation
for all parameters. For segments torch would loop over the parameters, because `ShardParam` is a subclass of Parameter.
The fused kernel accepts such subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.optim.param_groups import FullParam, ParamGroups, first_line, step_subsets
from meshwright.runtime.shard.optimizer_shard import ShardParam
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe
from meshwright.spec.workload_constraints import UpdateProperties, update_violations

RELATIVE_TOLERANCE = 1e-6
"""Two results count as equal if the norm of their difference is at most this fraction of the norm of the change by the
steps. The difference is smaller if only the order of operations differs, and larger if the update rules differ."""

KIND_MATRIX, KIND_OTHER, KIND_VECTOR = range(3)
_PROBE_SHAPES = {
    KIND_MATRIX: ((6, 8), (9, 5)),
    KIND_OTHER: ((7, 4, 2, 3, 2, 2), (5, 6, 3, 2, 2, 3)),
    KIND_VECTOR: ((11,), (13,)),
}
"""Shapes of probe tensors for matrices of blocks, for other tensors (embeddings, heads, filters, stacked experts) and
for vectors. Each kind has two shapes, because the update of one tensor may depend on another tensor. If the model's
tensor has d dimensions, the probe tensor has the first d sizes of a shape."""

MAX_PROBE_STEPS, MAX_PROBE_CALLS = 120, 3000
"""Limits of a test of a custom rule: the number of steps, and the number of calls of `step`. For a model with many
groups, the limit on calls reduces the number of steps, but not below 8."""

MAX_PROBE_ELEMENTS = 1 << 16
MAX_LARGE_PROBES = 64
"""Maximum number of large probe tensors. Each has at most MAX_PROBE_ELEMENTS elements."""


class ProbeTensor(NamedTuple):
    """A small tensor that represents all tensors of the model with the same kind, number of dimensions and optimizer
    group. `path` is the name of one tensor that it represents."""

    path: str
    shape: tuple[int, ...]
    kind: int


class UpdateRule(NamedTuple):
    """The update rule of an optimizer. `matrices`: whether it needs matrices of blocks as full tensors. `others`:
    whether it needs all other tensors as full tensors."""

    matrices: bool
    others: bool

    def needs_full(self, shape: Sequence[int], in_block: bool) -> bool:
        """Returns whether the optimizer needs a tensor of this shape in full."""
        return self.matrices if tensor_kind(shape, in_block) == KIND_MATRIX else self.others


ELEMENTWISE = UpdateRule(False, False)


def tensor_kind(shape: Sequence[int], in_block: bool) -> int:
    """Returns the kind of a tensor: KIND_VECTOR, KIND_MATRIX (a matrix of a block) or KIND_OTHER."""
    return KIND_VECTOR if len(shape) < 2 else KIND_MATRIX if in_block and len(shape) == 2 else KIND_OTHER


FUSABLE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def enable_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Enables fused kernels before the first step ([Note: fused on CPU])."""
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


def folds_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's kernel divides the gradients by its attribute `grad_scale`, a float32 tensor, in
    the pass in which it updates float32 weights. Without this pass, an update of AdamW takes 0.87 of the CPU time."""
    return type(optimizer) in FUSABLE_OPTIMIZERS and all(
        group.get("fused") and all(each.dtype == torch.float32 for each in group["params"])
        for group in optimizer.param_groups
    )


def has_fused_kernel(kinds: Sequence[str]) -> bool:
    """Returns whether one fused kernel can update tensors on all devices of the types `kinds`.

    >>> has_fused_kernel(["cpu", "cpu"]), has_fused_kernel(["cuda"])
    (True, True)
    >>> has_fused_kernel(["cpu", "cuda"]), has_fused_kernel(["meta"])
    (False, False)
    """
    return len(set(kinds)) <= 1 and all(backend_of(kind).has_fused_optimizer for kind in kinds)


def check_update_rule(device: str, rule: UpdateRule, recipe: Recipe, plan: Plan) -> None:
    """Raises InputError if the plan or the precision recipe does not support the update rule. For example, low-bit
    states need an elementwise rule."""
    if rule != ELEMENTWISE and (recipe.rounds or recipe.eight):
        raise InputError(
            Message(
                "precision {recipe}: optimizer states of {what} bits need an optimizer that updates each element "
                "separately, but this one updates whole tensors (as Muon and Adafactor do): use AdamW, or another "
                "precision",
                recipe=recipe.name,
                what=8 if recipe.eight else 16,
            )
        )
    for fault in update_violations(
        plan, UpdateProperties(recipe, rule != ELEMENTWISE, backend_of(device).memory_is_host)
    ):
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=fault.message))


def probe_update_rule(groups: ParamGroups) -> UpdateRule:
    """Returns the update rule. Raises InputError if it is neither elementwise nor by tensor, or if a step fails."""
    generator = torch.Generator().manual_seed(0)
    samples = _probe_tensors(groups)
    start, *steps = _random_tensors(samples, generator, 3)
    try:
        whole, _ = _run_probe(groups, samples, start, steps)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            Message(
                "the optimizer cannot be used: {type}: {first_line}",
                type=type(error).__name__,
                first_line=first_line(error),
            )
        ) from error
    for at, each in enumerate(samples):
        if torch.equal(whole[at], start[at].view(-1)):
            raise InputError(
                Message(
                    "the optimizer did not change a tensor of the group of {path} in two steps: it must update all "
                    "parameters in its param_groups",
                    path=each.path,
                )
            )
        one = slice(at, at + 1)
        try:
            single, _ = _run_probe(groups, samples[one], start[one], [gradients[one] for gradients in steps])
        except Exception as error:
            raise InputError(
                Message(
                    "the optimizer must also run with a single tensor, but it fails then ({first_line})",
                    first_line=first_line(error),
                )
            ) from error
        if not _is_close(start[one], whole[one], single):
            raise InputError(
                Message(
                    "the optimizer's update of one tensor depends on other tensors, but a rank stores only some of "
                    "them: use one that updates each element (AdamW, SGD) or each tensor (Muon, Adafactor) separately"
                )
            )
    for rule in (ELEMENTWISE, UpdateRule(True, False), UpdateRule(False, True)):
        flat = [at for at, each in enumerate(samples) if not rule.needs_full(each.shape, each.kind == KIND_MATRIX)]
        try:
            cut, found = _run_probe(groups, samples, start, steps, flat)
        except Exception:  # an optimizer that needs full tensors may raise any error for segments
            continue
        # The probe rejects a rule if the tensors that it updates as segments have different kinds of states, because
        # all segments of a flat group must have the same kinds.
        if _is_close(start, whole, cut) and len({found[at] for at in flat}) < 2:
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
    """Returns the first rule that passes the test of [Note: custom rules] and needs at least the full tensors that
    `least` needs. The test runs `steps` steps, and compares separate updates of each of `samples` with a joint update
    of all of them as full tensors. Raises InputError if no rule passes."""
    start, *gradients = _random_tensors(samples, torch.Generator().manual_seed(1), steps + 1)
    for at, each in enumerate(gradients):
        for gradient in each:
            gradient.mul_((1.0, 1e-4, 1e4, 1.0)[at % 4])
    try:
        whole, _ = _run_probe(groups, samples, start, gradients)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            Message(
                "the optimizer cannot be used: {type}: {first_line}",
                type=type(error).__name__,
                first_line=first_line(error),
            )
        ) from error
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
        Message(
            "the optimizer's update of one tensor depends on other tensors, on the number of tensors in a step, or "
            "on their values at its creation. But a rank stores only some of the tensors: {steps} steps with one "
            "tensor at a time differ from {steps} steps with all tensors at once: use an optimizer that updates each "
            "element (AdamW, SGD) or each tensor (Muon, Adafactor) separately",
            steps=steps,
        )
    )


def _random_tensors(samples: Sequence[ProbeTensor], generator: torch.Generator, count: int) -> list[list[torch.Tensor]]:
    return [
        [torch.randn(each.shape, generator=generator, dtype=torch.float64, device="cpu") for each in samples]
        for _ in range(count)
    ]


def _probe_tensors(groups: ParamGroups) -> list[ProbeTensor]:
    """Returns two probe tensors for each kind and number of dimensions in each group."""
    first: dict[tuple[int, int, int], str] = {}
    for name, shape in groups.shapes.items():
        first.setdefault((tensor_kind(shape, groups.in_block[name]), len(shape), groups.group_of[name]), name)
    return [
        ProbeTensor(name, shape[:dims], kind)
        for (kind, dims, _), name in sorted(first.items())
        for shape in _PROBE_SHAPES[kind]
    ]


def _large_probe_tensors(groups: ParamGroups) -> list[ProbeTensor]:
    """Returns one probe tensor for each group, kind and number of dimensions, but at most MAX_LARGE_PROBES. The probe
    tensor has the shape of the model's largest tensor of that group, kind and number of dimensions. The longest side is
    halved repeatedly until the probe tensor has at most MAX_PROBE_ELEMENTS elements. Tensors without elements have no
    probe tensor."""
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
    """Returns the flat values of the tensors after the steps, and the names of the states of each tensor. `start`
    contains the initial values, and `steps` the gradients of each step. Tensors at the indices `flat` are passed as two
    segments each. `one_by_one`: whether each segment or tensor is updated in a separate call of `step`, and full
    tensors are zero when the optimizer is created."""
    values = [
        torch.zeros_like(each) if one_by_one and at not in flat else each.clone() for at, each in enumerate(start)
    ]
    params: list[list[ShardParam | FullParam]] = []
    for at, (value, sample) in enumerate(zip(values, samples, strict=True)):
        if at in flat:
            params.append(
                [ShardParam(part, value.ndim > 1, sample.path) for part in value.view(-1).split(value.numel() // 2 + 1)]
            )
        else:
            params.append([FullParam(value, sample.path, sample.kind == KIND_MATRIX)])
    optimizer = groups.build_optimizer([parameter for each in params for parameter in each], for_probe=True)
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr") or 1e-2  # a rate of 0 would hide the update
    for value, each in zip(values, start, strict=True):
        value.copy_(each)
    for gradients in steps:
        for pieces, gradient in zip(params, gradients, strict=True):
            parts = gradient.view(-1).split([each.numel() for each in pieces])
            for parameter, part in zip(pieces, parts, strict=True):
                parameter.grad = part.clone().view(parameter.shape)
        if one_by_one:
            _step_each(optimizer, [parameter for pieces in params for parameter in pieces])
        else:
            optimizer.step()
    kinds = [
        tuple(sorted(key for key, value in optimizer.state[pieces[0]].items() if value is not None))
        for pieces in params
    ]
    return [torch.cat([parameter.detach().view(-1) for parameter in pieces]) for pieces in params], kinds


def _step_each(optimizer: torch.optim.Optimizer, parameters: Sequence[ShardParam | FullParam]) -> None:
    """Runs one update, with a separate call of `step` for each parameter."""
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
