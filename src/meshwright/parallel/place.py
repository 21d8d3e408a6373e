"""Which layer of a model lies on which stage, and what becomes of the rest on this rank: modules that other ranks hold make room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.parallel.later import ORIGIN, Later
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.pipeline.carry import Wants


@dataclass(frozen=True)
class Layer:
    """A layer of the model with the names of its parameters; `stage` is where it runs."""

    name: str
    parameters: tuple[str, ...]
    stage: int


def stage_bounds(anatomy: Anatomy, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """First and last-plus-one block of each stage."""
    bounds, first = {}, 0
    for stage, count in enumerate(mesh.plan.stage_layers(max(anatomy.count, 1))):
        bounds[stage] = (first, first + count)
        first += count
    return bounds


def place_layers(named: list[tuple[str, list[str]]], anatomy: Anatomy, mesh: Mesh, wants: Wants | None) -> list[Layer]:
    bounds = stage_bounds(anatomy, mesh)
    last = mesh.plan.stages - 1

    def stage_of(name: str) -> int:
        if name.startswith("block.") and anatomy.blocks is not None:
            index = int(name.partition(".")[2])
            return next(stage for stage, (start, stop) in bounds.items() if start <= index < stop)
        if name.startswith("between.") and wants is not None:
            return stage_of(f"block.{wants.firsts[int(name.partition('.')[2]) + 1] - 1}")
        return last if name in ("back", "head") else 0

    return [Layer(name, tuple(parameters), stage_of(name)) for name, parameters in named]


def kept_paths(anatomy: Anatomy, wants: Wants | None) -> tuple[str, ...]:
    """Blocks and embedding that the model's own code must come to on every stage, in shapes that are right."""
    return (*anatomy.cuts, *([anatomy.embedding] if anatomy.embedding else [])) if wants else ()


def drop_absent(model: nn.Module, anatomy: Anatomy, held: set[str], keep_head: bool, dtype: torch.dtype, cuts: Sequence[str]) -> None:
    """Replace every module none of whose parameters this rank holds by an `Absent`, but for those whose own code leads to the blocks `cuts`."""
    kept_prefix = f"{anatomy.head}." if keep_head and anatomy.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = tuple(f"{path}." for path in anatomy.cuts) or ("\n",)

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in list(module.named_children()):
            path = f"{prefix}{child_name}"
            inside = {names[id(parameter)] for parameter in child.parameters()}
            if not inside or (kept_prefix and f"{path}." == kept_prefix):
                continue
            leads = any(cut.startswith(f"{path}.") for cut in cuts)
            if inside & held or leads or (kept_prefix and kept_prefix.startswith(f"{path}.")):
                visit(child, f"{path}.")
            else:
                module._modules[child_name] = Absent(child, dtype, f"{path}.".startswith(blocks))

    visit(model, "")


def second_copy(model: nn.Module, anatomy: Anatomy) -> nn.Parameter:
    """Both ends of a V are on this rank: of a tied weight two copies, which are kept equal as on two ranks."""
    head: Any = model.get_submodule(anatomy.head or "")
    first = head.weight
    head.weight = second = nn.Parameter(first.detach().clone())
    if hasattr(first, ORIGIN):
        setattr(second, ORIGIN, getattr(first, ORIGIN))
    return second


def give_places(model: nn.Module, device: torch.device, later: Later) -> None:
    """Parameters without memory become NaN of one element each, so that they can be laid flat and are never silently zero; those that begin
    `later` take along how."""
    places: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                nan = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                place = places.setdefault(id(parameter), nn.Parameter(nan, requires_grad=parameter.requires_grad))
                seen = later.seen(parameter)
                if seen is not None:
                    setattr(place, ORIGIN, seen)
                module._parameters[name] = place
