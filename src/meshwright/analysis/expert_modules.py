"""Finds modules of stacked experts, counts their experts, and temporarily replaces their parameters or expert counts.
The analysis and runtime/expert_parallel use it.

The forward of such a module takes (hidden states, expert indices of each token, routing weights of each token). In
Llama 4 it takes only rows that are grouped by expert. All parameters of the module are stacked by expert along their
first dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.analysis.graph import StackedExperts


def has_experts(model: nn.Module) -> bool:
    """Returns whether any module of `model` may have stacked experts."""
    return any(num_experts_by_pairs(module) or num_experts_by_rows(module) for module in model.modules())


def num_experts_by_pairs(module: nn.Module) -> int:
    """Returns the number of stacked experts of a module whose forward takes hidden states, expert indices and routing
    weights. Returns 0 for any other module.
    """
    takes = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if takes.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) != 3:
        return 0
    shapes = [parameter.shape for parameter in module.parameters()]
    if len(shapes) < 2 or not all(shapes):
        return 0
    counts = {value for path, _, value in expert_count_attributes(module) if not path}
    stacked = {shape[0] for shape in shapes}
    if len(stacked) == 1 and sum(len(shape) == 3 for shape in shapes) >= 2:
        return max(stacked) if max(stacked) > 1 else 0
    return next((count for count in sorted(counts) if count > 1 and all(size % count == 0 for size in stacked)), 0)


def num_experts_by_rows(module: nn.Module) -> int:
    """Returns the number of stacked experts of a module whose forward takes only rows sorted by expert. Returns 0 for
    any other module.

    In Llama 4 such a module gets one row for each pair of token and expert. The row is zero if the token did not choose
    the expert.
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    takes = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    stacked = {shape[0] for shape in shapes if shape}
    if (
        takes != [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        or len(stacked) != 1
        or sum(len(shape) == 3 for shape in shapes) < 2
    ):
        return 0
    named_counts = {value for path, _, value in expert_count_attributes(module) if not path}
    return max(stacked) if max(stacked) > 1 and stacked <= named_counts else 0


def expert_count_attributes(module: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yields path, name and value of the integer attributes of the module and its submodules that may count experts."""
    for path, inside in module.named_modules():
        for name, value in vars(inside).items():
            if type(value) is int and "expert" in name:
                yield path, name, value


@contextmanager
def replaced_parameters(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replaces the parameters named in `state` by the tensors in `state`. Restores the parameters on exit."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for name, tensor in state.items():
        path, _, short = name.rpartition(".")
        places.append((vars(module.get_submodule(path))["_parameters"], short, tensor))
    before = [entries[short] for entries, short, _ in places]
    try:
        for entries, short, tensor in places:
            entries[short] = tensor
        yield
    finally:
        for (entries, short, _), parameter in zip(places, before, strict=True):
            entries[short] = parameter


@contextmanager
def local_expert_counts(module: nn.Module, experts: StackedExperts, ranks: int) -> Iterator[None]:
    """Sets the expert counts of `module` to those of a rank with 1 / `ranks` of the experts. Restores the counts on
    exit.
    """
    set_expert_count(module, experts, experts.count // ranks)
    try:
        yield
    finally:
        set_expert_count(module, experts, experts.count)


def set_expert_count(module: nn.Module, experts: StackedExperts, count: int) -> None:
    """Sets the expert counts of `module` to `count`."""
    for where, name in experts.count_attributes:
        setattr(module.get_submodule(where) if where else module, name, count)


@contextmanager
def pass_through_experts(model: nn.Module, weighed: bool = False) -> Iterator[None]:
    """Replaces the forward of expert modules that `num_experts_by_pairs` recognises by a function that returns its
    input. Routing needs values, which meta tensors do not have. Restores the modules on exit.

    `weighed`: whether the output for a token is multiplied by the sum of routing weight x (expert index + 1) over the
    experts of the token. This gives the router a gradient.
    """

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            kinds = [tensor.is_floating_point() for tensor in given]
            if sorted(kinds) != [False, True, True]:
                return forward(*args, **kwargs)
            hidden, index, weights = (
                given[kinds.index(True)],
                given[kinds.index(False)],
                given[2 - kinds[::-1].index(True)],
            )
            if not weighed or len(weights) != hidden.flatten(0, -2).shape[0]:
                return hidden.clone()
            times = weights * (index.to(weights.dtype) + 1) if index.shape == weights.shape else weights
            return hidden * times.flatten(1).sum(1).view(*hidden.shape[:-1], 1).to(hidden.dtype)

        return pass_through

    modules = [module for module in model.modules() if "forward" not in vars(module) and num_experts_by_pairs(module)]
    try:
        for module in modules:
            module.forward = stand_in(module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            del module.forward
