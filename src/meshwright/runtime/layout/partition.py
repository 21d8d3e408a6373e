"""Which stages hold which parameters: each holds those of its blocks, and of the others those that what it computes
comes from (analysis/dataflow.py).

A parameter that several stages come to, such as a table of words that is the head too, or the scales of all layers in
one vector, is held by each
of them, and its gradients are summed over them.

Which layer of a model lies on which stage, and what becomes of the rest on this rank: modules that other ranks hold
make room.

Parameters that several stages compute with (holding.py): each stage has a copy of its own, also where one rank runs
several stages, so that the
gradients of each are whole when its backward is, and are summed over the copies once a step.

A rank runs one stage at a time: before each pass the copies of the running stage stand where the model reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from meshwright.analysis.dataflow import DataflowRecord, StageInterface, trace_stage_parameters
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.remat.tape import OWN_CHECKPOINT_REASON
from meshwright.core.errors import InputError
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.deferred_init import RECIPE_ATTRIBUTE, DeferredInit
from meshwright.runtime.host_heap import malloc_trim
from meshwright.runtime.layout.placeholder import StagePlaceholder
from meshwright.runtime.non_tensor_state import EXTRA_STATE_KEY
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.boundary_tensors import BoundarySpec
from meshwright.spec.plan import Plan

ParamStages = Mapping[str, tuple[int, ...]]
"""Of parameters outside of the blocks the stages that compute with them, in order."""

NO_PARAM_STAGES: ParamStages = {}


def check_block_calls(record: DataflowRecord, anatomy: ModelGraph, plan: Plan) -> None:
    """Raises InputError where stages cannot be entered and left once in a pass, at the calls of their blocks, in their
    order."""
    paths, where = anatomy.block_paths, f"plan {plan.name}:"
    if record.obstacle is not None:
        what, block = record.obstacle
        said = {
            "again": OWN_CHECKPOINT_REASON.replace(": use pp1", ""),
            "no_grad": "runs where torch records no gradient, in a function with a backward of its own",
            "random": "runs in some passes and not in others (layers dropped at random?)",
        }
        raise InputError(
            f"{where} {paths[block]} {said[what]}, and stages are left and entered between blocks: use pp1"
        )
    twice = next((block for block, times in Counter(record.calls).items() if times > 1), None)
    if twice is not None:
        raise InputError(
            f"{where} {paths[twice]} runs more than once in a pass, and stages are left and entered between blocks: use pp1"
        )
    missing = next((path for block, path in enumerate(paths) if block not in record.calls), None)
    if missing is not None:
        raise InputError(
            f"{where} {missing} did not run with what the model seems to read: give an example of it, or use pp1"
        )
    turn = next((paths[after] for before, after in pairwise(record.calls) if after < before), None)
    if turn is not None and len(anatomy.stacks) > 1:
        raise InputError(f"blocks of several lists run by turns ({turn} behind one of a later list): use pp1")
    if turn is not None:
        raise InputError(
            f"{where} {turn} runs behind a later block of its list, and stages run blocks in the order of the list: use pp1"
        )


def find_param_stages(
    record: DataflowRecord,
    anatomy: ModelGraph,
    wants: BoundarySpec,
    bounds: Mapping[int, tuple[int, int]],
    plan: Plan,
    own_loss: bool,
) -> ParamStages:
    """The stages that hold each parameter outside of the blocks. Raises InputError where a stage would need what only
    another one has."""
    if wants.unsent:
        raise InputError(
            f"{wants.unsent} is given a mask or numbers that are made of weights of another stage: use pp1, or give them as floats"
        )
    paths = anatomy.block_paths
    stage_of = {
        name: stage
        for stage, (start, stop) in bounds.items()
        for path in paths[start:stop]
        for name in record.names
        if name.startswith(f"{path}.")
    }
    found: dict[str, list[int]] = defaultdict(list)
    for number, (start, stop) in bounds.items():
        receives = wants.message(start) if number else ()
        sends = wants.message(stop) if number + 1 < len(bounds) else ()
        stage = StageInterface(start, stop, receives, tuple(key for key in sends if key not in receives), wants.firsts)
        needed, lost = trace_stage_parameters(record, stage, paths, own_loss)
        if lost:
            raise InputError(
                f"plan {plan.name}: stage {number} of this model reads what layers of an earlier stage make past the state that it is sent ({lost}): "
                "cut elsewhere with layers per stage, or use pp1"
            )
        for name in sorted(needed):
            if name in stage_of:
                raise InputError(
                    f"plan {plan.name}: {name} is read on stage {number} and lies in a block of stage {stage_of[name]}: use pp1, or let stages share it "
                    "outside of the blocks"
                )
            found[name].append(number)
    return {name: tuple(stages) for name, stages in found.items()}


def find_buffer_stages(
    record: DataflowRecord,
    anatomy: ModelGraph,
    bounds: Mapping[int, tuple[int, int]],
    saved: Collection[str],
    plan: Plan,
) -> dict[str, int]:
    """The stage that writes to each of the buffers that the forward writes to. Raises InputError where this is not one
    stage of a `saved` buffer.

    Code before the first block also runs on later stages, and code between blocks on those behind: what they write is
    not the model's.
    """
    inside = tuple(f"{path}." for path in anatomy.block_paths)
    replaced = min((name for name in record.replaced & set(saved) if not name.startswith(inside)), default=None)
    if replaced is not None:
        raise InputError(
            f"plan {plan.name}: the forward puts another tensor in the place of the buffer {replaced}, and stages hold one each: write to it in place "
            "(copy_), register it with persistent=False, or use pp1"
        )
    found = {}
    for name, blocks in record.written_buffers.items():
        stages = sorted({next(stage for stage, (_, stop) in bounds.items() if block < stop) for block in blocks})
        if len(stages) > 1 and name in saved:
            raise InputError(
                f"plan {plan.name}: stages {stages[0]} and {stages[1]} both write to the buffer {name}: use pp1"
            )
        found[name] = stages[0]
    return found


@dataclass(frozen=True)
class StageLayer:
    """A layer of the model with the names of its parameters; `stage` is where it runs, `also` the other stages that
    compute with them."""

    name: str
    parameters: tuple[str, ...]
    stage: int
    also: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        return (self.stage, *self.also)


@dataclass(frozen=True)
class ExtraState:
    """What a model's saved state holds beside its parameters: `buffers` with their whole shapes, and `second` names of
    shared parameters with the first.
    `stages`: where a buffer is what the model's code made of it; other stages come to it with nothing, or not at
    all."""

    buffers: dict[str, torch.Size] = field(default_factory=dict)
    second: dict[str, str] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    """Keys of what modules give themselves (extra_state.py)."""


def find_extra_state(
    model: nn.Module, anatomy: ModelGraph, table: Sequence[StageLayer], writers: Mapping[str, int]
) -> ExtraState:
    """Of a model that is still whole. A buffer is of the stage that writes to it (`writers`). One that no stage writes
    to has the stage of the parameters
    around it; where these are on several stages, the last one if it was registered after the blocks, else the first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True).keys()
    second = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in saved
    }
    buffers = {name: buffer.shape for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    stage_of = {name: layer.stage for layer in table for name in layer.parameters}
    order = [name for name, _ in model.named_modules()]
    last = max(
        (
            at
            for at, name in enumerate(order)
            if anatomy.blocks and f"{name}.".startswith(f"{anatomy.block(anatomy.count - 1)}.")
        ),
        default=0,
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

    return ExtraState(
        buffers,
        {name: one for name, one in second.items() if name != one},
        {**{name: stage(name) for name in buffers}, **writers},
        tuple(name for name in saved if name.rpartition(".")[2] == EXTRA_STATE_KEY),
    )


def check_stage_cut(model: nn.Module, anatomy: ModelGraph, plan: Plan) -> None:
    """Raises InputError for what would be left out: hooks of blocks, where stages leave and enter; hooks of parameters
    of which shares are made."""
    for index in range(anatomy.count) if plan.stages > 1 and anatomy.blocks else ():
        block = model.get_submodule(anatomy.block(index))
        if block._forward_hooks or block._forward_pre_hooks:
            raise InputError(
                f"plan {plan.name}: {anatomy.block(index)} has a hook, and stages pass by the hooks of blocks: hang it to a layer inside, or use pp1"
            )
    for name, parameter in model.named_parameters() if plan.tp > 1 else ():
        if has_gradient_hooks(parameter) and name in anatomy.splits:
            raise InputError(
                f"plan {plan.name}: {name} has a gradient hook, which shares of tensor ranks do not call: use tp1, or take it off"
            )
    for name, parameter in model.named_parameters() if max(plan.tp, plan.cp, plan.stages) > 1 else ():
        if not has_gradient_hooks(parameter):
            continue
        try:
            is_linear = _are_hooks_linear(parameter)
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


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether the user registered hooks of its gradient, before or after it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _are_hooks_linear(parameter: nn.Parameter) -> bool:
    """Returns whether the gradient hooks of `parameter` give for a sum of two random gradients the sum of what they
    give for each."""
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
            torch.randn(parameter.shape, generator=random, dtype=kind).to(
                parameter.device if not parameter.is_meta else "cpu"
            )
            for _ in range(2)
        )
        together, apart = hooked(one + other), hooked(one) + hooked(other)
        return bool(
            (together - apart).norm() <= (1e-10 if kind in (torch.float64, torch.complex128) else 1e-4) * apart.norm()
        )


def stage_bounds(anatomy: ModelGraph, mesh: ParallelContext) -> dict[int, tuple[int, int]]:
    """First and last-plus-one block of each stage."""
    bounds, first = {}, 0
    for stage, count in enumerate(mesh.plan.stage_layers(max(anatomy.count, 1))):
        bounds[stage] = (first, first + count)
        first += count
    return bounds


def assign_layers(
    named: list[tuple[str, list[str]]],
    anatomy: ModelGraph,
    mesh: ParallelContext,
    wants: BoundarySpec | None,
    holders: ParamStages = NO_PARAM_STAGES,
) -> list[StageLayer]:
    """`named` with their stages: blocks by their numbers, other parameters where `holders` says that stages compute
    with them, and where it does not,
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

    table: list[StageLayer] = []
    for name, parameters in named:
        base = stage_of(name)
        held: dict[tuple[int, ...], list[str]] = {}
        for parameter in parameters:
            stages = (
                (base,) if name.startswith("block.") else _stages_with_group(holders.get(parameter) or (base,), plan)
            )
            held.setdefault(stages, []).append(parameter)
        for stages, some in held.items():
            if name == "embedding" and anatomy.tied and set(stages) <= {0, last}:
                table.append(StageLayer(name, tuple(some), 0))  # the head holds the last stage's copy
            elif name == "embedding" and anatomy.tied:
                raise InputError(
                    f"plan {plan.name}: {some[0]} is read between blocks and by the head that it is tied to: use pp1"
                )
            elif len(stages) > 1:
                table += [StageLayer(f"shared.{parameter}", (parameter,), stages[0], stages[1:]) for parameter in some]
            else:
                table.append(StageLayer(name if stages == (base,) else f"{name}.{stages[0]}", tuple(some), stages[0]))
    return table


def _stages_with_group(stages: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """`stages` that have a group for the sum of their gradients: those of one rank, the first and the last, or all."""
    few = len({plan.stage_to_rank(stage) for stage in stages}) == 1 or set(stages) <= {0, plan.stages - 1}
    return stages if few else tuple(range(plan.stages))


def paths_run_on_every_stage(anatomy: ModelGraph, wants: BoundarySpec | None) -> tuple[str, ...]:
    """Blocks and embedding that the model's own code must come to on every stage, in shapes that are right."""
    return (
        (*anatomy.block_paths, *([anatomy.embedding] if anatomy.embedding else [])) if wants and wants.is_more else ()
    )


def local_parameters(
    model: nn.Module, table: Sequence[StageLayer], present: Collection[str], keep_head: bool
) -> dict[str, nn.Parameter]:
    """The parameters that this rank lays, by name; a tied head has that of the embedding. No others: their memory goes
    with their modules."""
    tied = {name for layer in table if layer.name == "embedding" for name in layer.parameters} if keep_head else set()
    return {name: parameter for name, parameter in model.named_parameters() if name in present or name in tied}


def drop_other_stages(
    model: nn.Module,
    anatomy: ModelGraph,
    held: set[str],
    keep_head: bool,
    kind: tuple[torch.device, torch.dtype],
    cuts: Sequence[str],
) -> None:
    """Replace every module none of whose parameters this rank holds by an `StagePlaceholder` of this `kind`, but for
    lists, which are gone through, and those whose own
    code leads to the blocks `cuts`."""
    kept_prefix = f"{anatomy.head}." if keep_head and anatomy.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = tuple(f"{path}." for path in anatomy.block_paths) or ("\n",)

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
                module._modules[child_name] = StagePlaceholder(child, kind, f"{path}.".startswith(blocks))

    visit(model, "")
    malloc_trim()  # before flat buffers are made beside it


def duplicate_parameter(first: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Returns a parameter of `values` for another stage, with the gradient hooks of `first`, and how it is initialised
    where that comes later."""
    copy = nn.Parameter(values, requires_grad=first.requires_grad)
    copy._backward_hooks = first._backward_hooks
    for hook in (getattr(first, "_post_accumulate_grad_hooks", None) or {}).values():
        copy.register_post_accumulate_grad_hook(hook)
    if hasattr(first, RECIPE_ATTRIBUTE):
        setattr(copy, RECIPE_ATTRIBUTE, getattr(first, RECIPE_ATTRIBUTE))
    return copy


def duplicate_tied_weight(
    model: nn.Module, anatomy: ModelGraph, table: Sequence[StageLayer]
) -> dict[str, nn.Parameter]:
    """Both ends of a V are on this rank: of a tied weight two copies, which are kept equal as on two ranks. The head's,
    by name."""
    head: Any = model.get_submodule(anatomy.head or "")
    first = head.weight
    head.weight = second = duplicate_parameter(first, first.detach().clone())
    return {name: second for layer in table if layer.name == "embedding" for name in layer.parameters}


def materialize_placeholders(model: nn.Module, device: torch.device, later: DeferredInit) -> None:
    """Parameters without memory become NaN of one element each, so that they can be laid flat and are never silently
    zero; those that begin
    `later` take along how."""
    places: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                nan = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                place = places.setdefault(id(parameter), nn.Parameter(nan, requires_grad=parameter.requires_grad))
                seen = later.seen(parameter)
                if seen is not None:
                    setattr(place, RECIPE_ATTRIBUTE, seen)
                module._parameters[name] = place


@dataclass
class MultiStageParameters:
    """`copies` of this rank, by stage and name; `places` of each name: modules and the names that they know it by."""

    copies: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, table: Sequence[StageLayer], stages: Sequence[int]) -> MultiStageParameters:
        """Of a rank that runs `stages`. The first of them that holds a parameter has the model's own."""
        found = cls()
        own: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        for layer in table:
            here = [stage for stage in stages if layer.also and stage in layer.stages]
            for name in layer.parameters if len(here) > 1 else ():
                first = own[name]
                found.places[name] = [
                    (module, key)
                    for module in model.modules()
                    for key, held in module._parameters.items()
                    if held is first
                ]
                for stage in here:
                    found.copies.setdefault(stage, {})[name] = (
                        first if stage == here[0] else duplicate_parameter(first, first.detach())
                    )
        return found

    def add(self, stage: int, copies: Mapping[str, nn.Parameter]) -> None:
        """Copies of `stage` that stand where only it reads them."""
        self.copies.setdefault(stage, {}).update(copies)

    def put(self, stage: int) -> None:
        """Before a pass of `stage`."""
        for name, copy in self.copies.get(stage, {}).items():
            for module, key in self.places.get(name, ()):
                module._parameters[key] = copy


def tied_stage_groups(
    mesh: ParallelContext, factory: GroupFactory, several: Collection[tuple[int, ...]]
) -> dict[tuple[int, ...], CommGroup | None]:
    """The pipeline ranks that hold what several stages share, by these stages: the first's and the last's, all, or this
    one alone. All ranks call it."""
    plan = mesh.plan
    ends = factory.embedding() if (0, plan.stages - 1) in several else None
    found: dict[tuple[int, ...], CommGroup | None] = {}
    for stages in several:
        ranks = {plan.stage_to_rank(stage) for stage in stages}
        found[stages] = None if len(ranks) == 1 else ends if stages == (0, plan.stages - 1) else mesh.group("pp")
    return found
