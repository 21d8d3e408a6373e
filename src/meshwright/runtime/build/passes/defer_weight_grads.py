"""The build pass for weight gradients. If the schedule splits the backward, it defers them. With pipeline ranks, it
makes layers accumulate in place the gradients that are not deferred.

A split backward has two actions: B computes the gradient of a stage's input, and W computes its weight gradients later.
runtime/weight_gradients.py implements both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.layer_rules.rule import is_linear_like
from meshwright.runtime.backend import backend_of
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.assignment import stage_bounds
from meshwright.runtime.weight_gradients import (
    MIN_IN_PLACE_ELEMENTS,
    StepBackward,
    WgradQueue,
    defer_wgrad,
    has_users_hook,
    weight_gradient,
)
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.grid import defers_wgrad
from meshwright.spec.plan import Plan


@build_pass(reads=("model", "partition", "context", "flat"), writes=("wgrad_accumulation",))
def defer_weight_grads(build: Build) -> None:
    """Replaces the forward of matrix layers, so that weight gradients are computed later or accumulated in place."""
    model, graph, plan, groups = build.model, build.partition.stage_graph, build.context.plan, build.flat.stages
    install_deferred_wgrad(model, graph, plan, stage_bounds(graph, plan), groups)
    build.wgrad_accumulation = install_wgrad_accumulation(model, graph, groups, plan)


def install_deferred_wgrad(
    model: nn.Module,
    anatomy: ModelGraph,
    plan: Plan,
    bounds: Mapping[int, tuple[int, int]],
    flat: Mapping[int, Sequence[FlatParamGroup]],
) -> None:
    """Makes the matrix layers of blocks defer their weight gradients to W, if the schedule splits the backward.

    `bounds`: for each stage, its first block and the index after its last block. `flat`: the parameter groups of each
    stage. [Note: not deferred] in runtime/weight_gradients.py lists the exceptions.
    """
    for stage, stored in flat.items():
        unit_of = {name: unit for unit in stored if not unit.frozen for name in unit.parameters}
        for place, index in (
            enumerate(range(*bounds[stage])) if plan.splits_backward(stage) and anatomy.blocks is not None else ()
        ):
            if not defers_wgrad(plan, place):
                continue
            path = anatomy.block(index)
            for inside, module in model.get_submodule(path).named_modules():
                name = f"{path}.{inside}.weight"
                if is_linear_like(module) and name in unit_of:
                    queue = unit_of[name].defer_wgrads()
                    defer_wgrad(module, partial(_enqueue, queue, name, isinstance(module, nn.Linear)))


def _enqueue(backlog: WgradQueue, name: str, linear: bool, x: torch.Tensor, gradient: torch.Tensor) -> None:
    backlog.push(name, partial(weight_gradient, x.detach(), gradient.detach(), linear))


def install_wgrad_accumulation(
    model: nn.Module, anatomy: ModelGraph, flat: Mapping[int, Sequence[FlatParamGroup]], plan: Plan
) -> StepBackward:
    """Makes plain matrix layers, and embeddings outside of the blocks, accumulate their weight gradients in place.

    Returns the object that reports whether the backward of a step is running. [Note: where not] in
    runtime/weight_gradients.py lists the exceptions.
    """
    own = StepBackward()
    if plan.pp == 1:
        return own
    units = {
        id(tensor): (unit, name)
        for stored in flat.values()
        for unit in stored
        for name, tensor in unit.parameters.items()
    }
    within = tuple(f"{path}." for path, _ in anatomy.stacks) or (f"{anatomy.blocks}.",)
    layers = [
        (path.startswith(within), module, module._parameters.get("weight"))
        for path, module in model.named_modules()
        if path
    ]
    readers = Counter(id(weight) for _, _, weight in layers if weight is not None)
    for is_inside, module, weight in layers:
        unit, name = units.get(id(weight), (None, ""))
        if (
            unit is None
            or weight is None
            or not _can_accumulate_in_place(unit)
            or weight.numel() < MIN_IN_PLACE_ELEMENTS
            or (is_inside and plan.compile)
        ):
            continue
        if isinstance(module, nn.Embedding):
            module.sparse = not (is_inside or module.scale_grad_by_freq or has_users_hook(weight))
            continue
        at_once = unit.layout.zero_stage < 2 or (unit.wgrad_queue is None and readers[id(weight)] == 1)
        if (
            at_once
            and is_linear_like(module)
            and getattr(module, "put_off", None) is None
            and unit.gradients.buffer.dtype == unit.weights.dtype
        ):
            defer_wgrad(module, partial(_accumulate_wgrad, own, unit, name, isinstance(module, nn.Linear)))
    return own


def _can_accumulate_in_place(unit: FlatParamGroup) -> bool:
    return (
        not unit.frozen
        and unit.gradients.exact is None
        and backend_of(unit.gradients.buffer.device).memory_is_host
        and unit.gradients.buffer.itemsize >= 4
    )


def _accumulate_wgrad(
    own: StepBackward, unit: FlatParamGroup, name: str, linear: bool, x: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Adds the weight gradient of the parameter `name` to its accumulated gradient in `unit`. `x` (N, in) is the input
    of the layer, and `gradient` (N, out) is the gradient of the layer's output.

    Returns a sparse gradient without rows for autograd. Outside of the step's backward, returns the weight gradient
    instead of adding it.
    """
    if not own.is_running:
        return weight_gradient(x, gradient, linear)
    into, first = unit.gradients.slot(name)
    factors = (gradient.t(), x) if linear else (x.t(), gradient)
    torch.mm(*factors, out=into) if first else into.addmm_(*factors)
    no_rows = torch.empty(1, 0, dtype=torch.int64), into.new_empty(0, *into.shape[1:])
    return torch.sparse_coo_tensor(*no_rows, into.shape, check_invariants=False)
