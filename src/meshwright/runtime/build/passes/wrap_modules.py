"""Wraps the forward of every block, and at ZeRO 3 of the modules outside of blocks whose weights are gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from meshwright.analysis.dataflow import WeightUses, is_within
from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.layout.placeholder import StagePlaceholder
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper, StageCursor
from meshwright.runtime.tensor_parallel.layers import SequenceParallelRegion
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.plan import Plan

TIED_EMBEDDING = "embedding's copy"
"""The name of the tied weight's layer on the last stage."""


def wrap_modules(
    model: nn.Module,
    graph: ModelGraph,
    context: ParallelContext,
    cursor: StageCursor,
    by_layer: dict[str, list[FlatParamGroup]],
    table: Mapping[str, Sequence[str]],
    reads: WeightUses,
) -> list[BlockWrapper]:
    """Returns the wrappers of all blocks, in order, then those of other modules.

    `table`: the parameters of each layer. `reads`: the modules that read each parameter.
    """
    plan = context.plan
    gates: list[BlockWrapper] = []
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name.rpartition(".")[0])
    shared = _shared_modules(model)
    if graph.blocks is not None:
        region = SequenceParallelRegion(context.tp) if plan.sequence_parallel else None
        paths = [graph.block(index) for index in range(graph.count)]
        for index in range(graph.count):
            block = model.get_submodule(paths[index])
            gate = BlockWrapper(block, cursor, index)
            units = [unit for name in (f"block.{index}", f"block.{index}.experts") for unit in by_layer.get(name, ())]
            gate.units = units if plan.zero == 3 and not _is_read_outside(paths[index], units, reads, shared) else []
            gate.is_sole_user = plan.zero == 3 and _is_sole_user(paths[index], units, owners, reads)
            if region is not None:
                gate.before = region.enter if index == 0 else None
                gate.after = region.leave if index == graph.count - 1 else None
            gates.append(gate)
    if plan.zero == 3:
        gates += _wrap_outer_modules(plan, model, graph, cursor, by_layer, table, reads)
        blocks = [gate for gate in gates if gate.index is not None]
        for gate in gates:
            for unit in gate.units:
                gate.is_tied |= unit.hooked
                unit.hooked = True
        for first, second in pairwise(blocks):
            first.following, second.previous = second.units, first.units
    return gates


def _wrap_outer_modules(
    plan: Plan,
    model: nn.Module,
    graph: ModelGraph,
    cursor: StageCursor,
    by_layer: dict[str, list[FlatParamGroup]],
    table: Mapping[str, Sequence[str]],
    reads: WeightUses,
) -> list[BlockWrapper]:
    """Wraps, for ZeRO 3, the one module that contains all parameters of a layer outside of the blocks.

    A parameter that another module reads too (`F.linear(x, table.weight)`) stays gathered through the step.
    """
    gates = []
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    also = {first: others for first, *others in names.values()}
    by_path: dict[str, list[FlatParamGroup]] = {}
    read_elsewhere: set[str] = set()
    for layer, parameters in table.items():
        if layer in by_layer and not (graph.blocks and layer.startswith("block.")):
            owners = {name.rpartition(".")[0] for first in parameters for name in (first, *also.get(first, ()))}
            sharing = _embeddings_of_table(model, graph) if layer == "embedding" else []
            paths = sharing or [_common_path(owners)]
            tied = [graph.head] if layer == "embedding" and graph.tied and graph.head else []
            if any(
                not is_within(reader.path, (*paths, *tied)) for name in parameters for reader in reads.get(name, ())
            ):
                read_elsewhere.add(layer)
                continue
            for path in paths:
                by_path.setdefault(path, []).extend(by_layer[layer])
    if graph.tied and graph.head is not None and "embedding" not in read_elsewhere:
        by_path.setdefault(graph.head, []).extend(by_layer.get(TIED_EMBEDDING, by_layer.get("embedding", ())))
    around = tuple(graph.block(index) for index in range(graph.count)) if graph.blocks is not None else ()
    for path, units in by_path.items():
        module = modules.get(path)
        if plan.stages > 1 and any(block.startswith(f"{path}.") for block in around):
            # A stage ends inside of such a module: its parameters stay gathered through the step.
            continue
        if (
            path
            and module is not None
            and not isinstance(
                module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict | StagePlaceholder
            )
        ):
            gate = BlockWrapper(module, cursor)
            gate.units = units
            gates.append(gate)
    return gates


def _is_read_outside(
    block: str, units: Sequence[FlatParamGroup], reads: WeightUses, shared: Mapping[str, Sequence[str]]
) -> bool:
    """Whether a module outside of `block` reads a parameter of its groups, which then stay gathered through the
    step."""
    readers = {reader.path for unit in units for name in unit.parameters for reader in reads.get(name, ())}
    return any(not is_within(path, (block,)) for reader in readers for path in shared.get(reader, (reader,)))


def _shared_modules(model: nn.Module) -> dict[str, list[str]]:
    """Returns all paths of each module that has several, by the first path, under which its reads are recorded."""
    paths: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[id(module)].append(path)
    return {first: [first, *others] for first, *others in paths.values() if others}


def _is_sole_user(
    block: str, units: Sequence[FlatParamGroup], owners: Mapping[int, Sequence[str]], reads: WeightUses
) -> bool:
    """Whether no module outside of `block` contains or reads a parameter of the groups."""
    parameters = [(name, parameter) for unit in units for name, parameter in unit.parameters.items()]
    return all(
        is_within(path, (block,))
        for name, parameter in parameters
        for path in (*owners[id(parameter)], *(reader.path for reader in reads.get(name, ())))
    )


def _embeddings_of_table(model: nn.Module, graph: ModelGraph) -> list[str]:
    """Returns every embedding with the vocabulary's weight: an encoder and a decoder have one each."""
    found = model.get_submodule(graph.embedding) if graph.embedding else None
    weight = found._parameters.get("weight") if found is not None else None
    return [
        path
        for path, module in model.named_modules()
        if weight is not None
        and (path == graph.embedding or (isinstance(module, nn.Embedding) and module.weight is weight))
    ]


def _common_path(paths: set[str]) -> str:
    """Returns the longest common prefix of dotted paths.

    >>> _common_path({"head.norm", "head.dense"})
    'head'
    """
    parts = [path.split(".") for path in sorted(paths)]
    common = []
    for step in zip(*parts, strict=False):
        if len(set(step)) > 1:
            break
        common.append(step[0])
    return ".".join(common)


def install_context(
    model: nn.Module, graph: ModelGraph, gates: list[BlockWrapper], context: ContextState | None
) -> None:
    """Makes blocks compute on this rank's part of the sequence. The hidden state of the first block is cut first."""
    for gate in gates if context is not None else ():
        assert context is not None
        if gate.index is not None:
            gate.inner = context.around(gate.inner, gate.index)
        if gate.index == 0:
            gate.before = _compose(context.cut_hidden, gate.before)
        if gate.index == graph.count - 1:
            gate.after = _compose(gate.after, context.place_hidden)
    if (
        context is not None
        and context.placed
        and not isinstance(head := model.get_submodule(graph.head or ""), StagePlaceholder)
    ):
        context.cut_before(head)


def _compose(*functions: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the composition of `functions`, in order; None is the identity."""

    def apply_all(hidden: torch.Tensor) -> torch.Tensor:
        for function in functions:
            hidden = hidden if function is None else function(hidden)
        return hidden

    return apply_all
