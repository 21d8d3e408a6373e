"""Reduces a model to the layers that this rank stores, with placeholders for all other layers. The build passes
`drop_other_stages` and `shard_tensors` use it.

If several stages of this rank compute with a parameter, each of these stages has a copy of the parameter. The gradient
of a copy is complete after the backward of its stage. Once per step, the gradients of all copies are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.nf4 import nan_scalar
from meshwright.runtime.build.stages.assignment import StageLayer
from meshwright.runtime.deferred_init import RECIPE_ATTRIBUTE, DeferredInit
from meshwright.runtime.host_process import malloc_trim
from meshwright.runtime.pipeline.block_wrapper import MultiStageParameters
from meshwright.runtime.stage_placeholder import StagePlaceholder


@dataclass(frozen=True)
class LocalStages:
    """The layers and parameters that this rank stores."""

    layers: dict[int, list[StageLayer]]
    """This rank's layers by stage."""
    parameters: dict[str, nn.Parameter]
    """This rank's parameters by name."""
    copies: MultiStageParameters
    """Copies of the parameters that several stages of this rank compute with."""


def local_parameters(
    model: nn.Module, table: Sequence[StageLayer], present: Collection[str], keep_head: bool
) -> dict[str, nn.Parameter]:
    """Returns the parameters that this rank stores, by name. `present`: the names of the parameters of its layers.
    `keep_head`: whether this rank runs a tied head, and therefore also stores the weight of the embedding."""
    tied = {name for layer in table if layer.name == "embedding" for name in layer.parameters} if keep_head else set()
    return {name: parameter for name, parameter in model.named_parameters() if name in present or name in tied}


def drop_other_stages(
    model: nn.Module,
    graph: ModelGraph,
    present: set[str],
    keep_head: bool,
    kind: tuple[torch.device, torch.dtype],
    cuts: Sequence[str],
) -> None:
    """Replaces a module by a `StagePlaceholder` if `present` contains none of its parameters. `kind`: the device and
    dtype of the placeholder's output.

    Some modules are not replaced: module lists, modules that contain one of the paths `cuts`, modules without
    parameters, and a tied head if `keep_head`.
    """
    head_prefix = f"{graph.head}." if keep_head and graph.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = tuple(f"{path}." for path in graph.block_paths) or ("\n",)
    replaced: list[tuple[nn.Module, StagePlaceholder]] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in list(module.named_children()):
            path = f"{prefix}{child_name}"
            inside = {names[id(parameter)] for parameter in child.parameters()}
            if not inside or (head_prefix and f"{path}." == head_prefix):
                continue
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
            leads = is_list or any(cut.startswith(f"{path}.") for cut in cuts)
            if inside & present or leads or (head_prefix and head_prefix.startswith(f"{path}.")):
                visit(child, f"{path}.")
            else:
                placeholder = StagePlaceholder(child, kind, f"{path}.".startswith(blocks))
                module._modules[child_name] = placeholder
                replaced.append((child, placeholder))

    visit(model, "")
    remaining = {id(module) for module in model.modules()}
    for original, placeholder in replaced:
        placeholder.take_over(original, remaining)
    malloc_trim()  # lowers the memory peak, because the flat buffers are allocated next


def duplicate_parameter(first: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Returns a new parameter with the given `values`, for a stage that must not use `first` itself.

    The new parameter gets the gradient hooks and the deferred initialisation of `first`.
    """
    copy = nn.Parameter(values, requires_grad=first.requires_grad)
    copy._backward_hooks = first._backward_hooks
    for hook in (getattr(first, "_post_accumulate_grad_hooks", None) or {}).values():
        copy.register_post_accumulate_grad_hook(hook)
    if hasattr(first, RECIPE_ATTRIBUTE):
        setattr(copy, RECIPE_ATTRIBUTE, getattr(first, RECIPE_ATTRIBUTE))
    return copy


def duplicate_tied_weight(model: nn.Module, graph: ModelGraph, table: Sequence[StageLayer]) -> dict[str, nn.Parameter]:
    """Gives the head its own copy of the tied weight. Returns the copy, by the name of the embedding's parameter.

    Only a rank that runs both the first and the last stage calls it. Embedding and head then train separate weights
    that stay equal, as on two ranks.
    """
    head: Any = model.get_submodule(graph.head or "")
    first = head.weight
    head.weight = second = duplicate_parameter(first, first.detach().clone())
    return {name: second for layer in table if layer.name == "embedding" for name in layer.parameters}


def materialize_placeholders(model: nn.Module, device: torch.device, deferred: DeferredInit) -> None:
    """Replaces each meta parameter by one NaN on `device`, expanded to the shape of the parameter. So a weight that is
    never initialised is NaN, which is noticed, instead of zero.

    The new parameter keeps the recipe of a deferred initialisation.
    """
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                nan = nan_scalar(parameter.dtype, device).expand(parameter.shape)
                replacement = replacements.setdefault(
                    id(parameter), nn.Parameter(nan, requires_grad=parameter.requires_grad)
                )
                seen = deferred.seen(parameter)
                if seen is not None:
                    setattr(replacement, RECIPE_ATTRIBUTE, seen)
                module._parameters[name] = replacement


def copy_shared_parameters(
    model: nn.Module, table: Sequence[StageLayer], stages: Sequence[int]
) -> MultiStageParameters:
    """Copies the parameters that several of this rank's `stages` compute with. Returns the copies by stage and name.
    The first stage that computes with a parameter uses the original."""
    copied = MultiStageParameters()
    own = dict(model.named_parameters())
    for layer in table:
        here = [stage for stage in stages if layer.also and stage in layer.stages]
        for name in layer.parameters if len(here) > 1 else ():
            first = own[name]
            copied.places[name] = [
                (module, key)
                for module in model.modules()
                for key, parameter in module._parameters.items()
                if parameter is first
            ]
            for stage in here:
                copied.copies.setdefault(stage, {})[name] = (
                    first if stage == here[0] else duplicate_parameter(first, first.detach())
                )
    return copied
