"""Which layer of a model lies on which stage, and what becomes of the rest on this rank: modules that other ranks hold make room."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.base.errors import InputError
from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.extra_state import LEAF
from meshwright.parallel.later import ORIGIN, Later
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.pipeline.carry import Wants
from meshwright.parallel.pipeline.holding import NOBODY, Holders
from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class Layer:
    """A layer of the model with the names of its parameters; `stage` is where it runs, `also` the other stages that compute with them."""

    name: str
    parameters: tuple[str, ...]
    stage: int
    also: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        return (self.stage, *self.also)


@dataclass(frozen=True)
class Beside:
    """What a model's saved state holds beside its parameters: `buffers` with their whole shapes, and `second` names of shared parameters with the first.
    `stages`: where a buffer is what the model's code made of it; other stages come to it with nothing, or not at all."""

    buffers: dict[str, torch.Size] = field(default_factory=dict)
    second: dict[str, str] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    """Keys of what modules give themselves (extra_state.py)."""


def beside_parameters(model: nn.Module, anatomy: Anatomy, table: Sequence[Layer], writers: Mapping[str, int]) -> Beside:
    """Of a model that is still whole. A buffer is of the stage that writes to it (`writers`). One that no stage writes to has the stage of the parameters
    around it; where these are on several stages, the last one if it was registered after the blocks, else the first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True).keys()
    second = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False) if name in saved}
    buffers = {name: buffer.shape for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    stage_of = {name: layer.stage for layer in table for name in layer.parameters}
    order = [name for name, _ in model.named_modules()]
    last = max(
        (at for at, name in enumerate(order) if anatomy.blocks and f"{name}.".startswith(f"{anatomy.block(anatomy.count - 1)}.")), default=0
    )

    def stage(name: str) -> int:
        owner = name.rpartition(".")[0]
        around = owner
        while around:
            held = {at for parameter, at in stage_of.items() if parameter.startswith(f"{around}.")}
            if held:
                break
            around = around.rpartition(".")[0]
        if around and len(held) == 1:
            return held.pop()
        return max(stage_of.values(), default=0) if order.index(owner) > last else 0

    return Beside(
        buffers,
        {name: one for name, one in second.items() if name != one},
        {**{name: stage(name) for name in buffers}, **writers},
        tuple(name for name in saved if name.rpartition(".")[2] == LEAF),
    )


def check_left_out(model: nn.Module, anatomy: Anatomy, plan: Plan) -> None:
    """Raises InputError for what would be left out: hooks of blocks, where stages leave and enter; hooks of parameters of which shares are made."""
    for index in range(anatomy.count) if plan.stages > 1 and anatomy.blocks else ():
        block = model.get_submodule(anatomy.block(index))
        if block._forward_hooks or block._forward_pre_hooks:
            raise InputError(
                f"plan {plan.name}: {anatomy.block(index)} has a hook, and stages pass by the hooks of blocks: hang it to a layer inside, or use pp1"
            )
    for name, parameter in model.named_parameters() if plan.tp > 1 else ():
        if has_hooks(parameter) and name in anatomy.splits:
            raise InputError(
                f"plan {plan.name}: {name} has a gradient hook, which shares of tensor ranks do not call: use tp1, or take it off"
            )
    for name, parameter in model.named_parameters() if max(plan.tp, plan.cp, plan.stages) > 1 else ():
        if not has_hooks(parameter):
            continue
        try:
            is_linear = _is_linear(parameter)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
            raise InputError(
                f"plan {plan.name}: the gradient hook of {name} does not run with a random gradient ({reason}), which shows whether it is linear: "
                "use data parallelism alone, or let it"
            ) from None
        if not is_linear:
            raise InputError(
                f"plan {plan.name}: the gradient hook of {name} is not linear, and tensor, context or pipeline ranks may each compute a part of that gradient: "
                "use data parallelism alone, or a linear hook"
            )


def has_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether the user registered hooks of its gradient, before or after it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _is_linear(parameter: nn.Parameter) -> bool:
    """Returns whether the gradient hooks of `parameter` give for a sum of two random gradients the sum of what they give for each."""
    kind = parameter.dtype if parameter.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    random = torch.Generator().manual_seed(0)

    def hooked(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        for hook in (parameter._backward_hooks or {}).values():
            found = hook(gradient)
            gradient = gradient if found is None else found
        holder = nn.Parameter(torch.zeros_like(gradient))
        holder.grad = gradient
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(holder)
        return holder.grad if holder.grad is not None else torch.zeros_like(gradient)

    with torch.no_grad():
        one, other = (
            torch.randn(parameter.shape, generator=random, dtype=kind).to(parameter.device if not parameter.is_meta else "cpu")
            for _ in range(2)
        )
        together, apart = hooked(one + other), hooked(one) + hooked(other)
        return bool((together - apart).norm() <= (1e-10 if kind in (torch.float64, torch.complex128) else 1e-4) * apart.norm())


def stage_bounds(anatomy: Anatomy, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """First and last-plus-one block of each stage."""
    bounds, first = {}, 0
    for stage, count in enumerate(mesh.plan.stage_layers(max(anatomy.count, 1))):
        bounds[stage] = (first, first + count)
        first += count
    return bounds


def place_layers(
    named: list[tuple[str, list[str]]], anatomy: Anatomy, mesh: Mesh, wants: Wants | None, holders: Holders = NOBODY
) -> list[Layer]:
    """`named` with their stages: blocks by their numbers, other parameters where `holders` says that stages compute with them, and where it does not,
    by the names of their layers. What several stages compute with stands in a layer of its own."""
    plan, bounds = mesh.plan, stage_bounds(anatomy, mesh)
    last = plan.stages - 1

    def stage_of(name: str) -> int:
        if name.startswith("block.") and anatomy.blocks is not None:
            index = int(name.partition(".")[2])
            return next(stage for stage, (start, stop) in bounds.items() if start <= index < stop)
        if name.startswith("between.") and wants is not None:
            return stage_of(f"block.{wants.firsts[int(name.partition('.')[2]) + 1] - 1}")
        return last if name in ("back", "head") else 0

    table: list[Layer] = []
    for name, parameters in named:
        base = stage_of(name)
        held: dict[tuple[int, ...], list[str]] = {}
        for parameter in parameters:
            stages = (base,) if name.startswith("block.") else _together(holders.get(parameter) or (base,), plan)
            held.setdefault(stages, []).append(parameter)
        for stages, some in held.items():
            if name == "embedding" and anatomy.tied and set(stages) <= {0, last}:
                table.append(Layer(name, tuple(some), 0))  # the head holds the last stage's copy
            elif name == "embedding" and anatomy.tied:
                raise InputError(f"plan {plan.name}: {some[0]} is read between blocks and by the head that it is tied to: use pp1")
            elif len(stages) > 1:
                table += [Layer(f"shared.{parameter}", (parameter,), stages[0], stages[1:]) for parameter in some]
            else:
                table.append(Layer(name if stages == (base,) else f"{name}.{stages[0]}", tuple(some), stages[0]))
    return table


def _together(stages: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """`stages` that have a group for the sum of their gradients: those of one rank, the first and the last, or all."""
    few = len({plan.rank_of(stage) for stage in stages}) == 1 or set(stages) <= {0, plan.stages - 1}
    return stages if few else tuple(range(plan.stages))


def kept_paths(anatomy: Anatomy, wants: Wants | None) -> tuple[str, ...]:
    """Blocks and embedding that the model's own code must come to on every stage, in shapes that are right."""
    return (*anatomy.cuts, *([anatomy.embedding] if anatomy.embedding else [])) if wants and wants.is_more else ()


def held_of(model: nn.Module, table: Sequence[Layer], present: Collection[str], keep_head: bool) -> dict[str, nn.Parameter]:
    """The parameters that this rank lays, by name; a tied head has that of the embedding. No others: their memory goes with their modules."""
    tied = {name for layer in table if layer.name == "embedding" for name in layer.parameters} if keep_head else set()
    return {name: parameter for name, parameter in model.named_parameters() if name in present or name in tied}


def drop_absent(
    model: nn.Module, anatomy: Anatomy, held: set[str], keep_head: bool, kind: tuple[torch.device, torch.dtype], cuts: Sequence[str]
) -> None:
    """Replace every module none of whose parameters this rank holds by an `Absent` of this `kind`, but for lists, which are gone through, and those whose own
    code leads to the blocks `cuts`."""
    kept_prefix = f"{anatomy.head}." if keep_head and anatomy.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = tuple(f"{path}." for path in anatomy.cuts) or ("\n",)

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in list(module.named_children()):
            path = f"{prefix}{child_name}"
            inside = {names[id(parameter)] for parameter in child.parameters()}
            if not inside or (kept_prefix and f"{path}." == kept_prefix):
                continue
            is_gone_through = isinstance(child, nn.ModuleList | nn.ModuleDict)
            leads = is_gone_through or any(cut.startswith(f"{path}.") for cut in cuts)
            if inside & held or leads or (kept_prefix and kept_prefix.startswith(f"{path}.")):
                visit(child, f"{path}.")
            else:
                module._modules[child_name] = Absent(child, kind, f"{path}.".startswith(blocks))

    visit(model, "")
    give_back()  # before flat buffers are made beside it


def copy_of(first: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Returns a parameter of `values` for another stage, with the gradient hooks of `first`, and how it is initialised where that comes later."""
    copy = nn.Parameter(values, requires_grad=first.requires_grad)
    copy._backward_hooks = first._backward_hooks
    for hook in (getattr(first, "_post_accumulate_grad_hooks", None) or {}).values():
        copy.register_post_accumulate_grad_hook(hook)
    if hasattr(first, ORIGIN):
        setattr(copy, ORIGIN, getattr(first, ORIGIN))
    return copy


def second_copy(model: nn.Module, anatomy: Anatomy, table: Sequence[Layer]) -> dict[str, nn.Parameter]:
    """Both ends of a V are on this rank: of a tied weight two copies, which are kept equal as on two ranks. The head's, by name."""
    head: Any = model.get_submodule(anatomy.head or "")
    first = head.weight
    head.weight = second = copy_of(first, first.detach().clone())
    return {name: second for layer in table if layer.name == "embedding" for name in layer.parameters}


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
