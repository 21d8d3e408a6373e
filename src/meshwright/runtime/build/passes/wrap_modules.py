"""Wraps the forward of every block for the pass `wrap_blocks`. At ZeRO 3 it also wraps the modules outside of the
blocks whose weights are all-gathered."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.analysis.dataflow import WeightUses, is_within
from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper, GatheredGroups, HiddenFunction, StageCursor
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.runtime.tensor_parallel.layers import SequenceParallelRegion
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.plan import Plan

TIED_EMBEDDING = "embedding's copy"
"""The layer name of the tied weight on the last stage."""


@dataclass(frozen=True)
class BlockSteps:
    """Functions that the wrappers of blocks call, in addition to all-gathers of weights.

    `before` and `after`: by the index of a block, a function of the hidden state that runs before or after the block.
    """

    inner: Callable[[int, nn.Module], Callable[..., Any]]
    """Takes the index and the module of a block. Returns the block's forward on this rank's piece of the sequence,
    compiled if the plan compiles."""
    before: Mapping[int, HiddenFunction]
    after: Mapping[int, HiddenFunction]


def wrap_modules(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    cursor: StageCursor,
    by_layer: dict[str, list[FlatParamGroup]],
    table: Mapping[str, Sequence[str]],
    reads: WeightUses,
    steps: BlockSteps,
) -> list[BlockWrapper]:
    """Wraps all blocks in order, and then other modules. Returns the wrappers in the same order.

    `by_layer`: the parameter groups of each layer. `table`: the names of each layer's parameters. `reads`: the modules
    that read each parameter.
    """
    paths = [graph.block(index) for index in range(graph.count)] if graph.blocks is not None else []
    blocks = [model.get_submodule(path) for path in paths]
    gathered, outer = [GatheredGroups()] * len(paths), list[tuple[nn.Module, GatheredGroups]]()
    if plan.zero in (1, 2):
        gathered = _pending_groups(plan, len(paths), by_layer)
    if plan.zero == 3:
        others = _outer_modules(plan, model, graph, by_layer, table, reads)
        of_blocks = _groups_of_blocks(model, paths, by_layer, reads)
        gathered = _mark_gathered([*of_blocks, *(GatheredGroups(units) for _, units in others)])
        outer = [(module, groups) for (module, _), groups in zip(others, gathered[len(paths) :], strict=True)]
    # A block may contain one of the `outer` modules. The compiler must skip this module, and does so only if it is
    # already wrapped. So the `outer` modules are wrapped before the blocks are compiled.
    others_wrapped = [BlockWrapper(module, cursor, None, groups) for module, groups in outer]
    wrapped = [
        BlockWrapper(
            block,
            cursor,
            index,
            gathered[index],
            steps.inner(index, block),
            steps.before.get(index),
            steps.after.get(index),
        )
        for index, block in enumerate(blocks)
    ]
    return [*wrapped, *others_wrapped]


def _groups_of_blocks(
    model: nn.Module, paths: Sequence[str], by_layer: Mapping[str, Sequence[FlatParamGroup]], reads: WeightUses
) -> list[GatheredGroups]:
    """Returns for each block the parameter groups that its wrapper all-gathers. If a module outside of the block reads
    one of the block's parameters, the wrapper gathers no groups, and all groups of the block stay gathered during the
    step."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name.rpartition(".")[0])
    shared = _shared_modules(model)
    units = [
        [unit for name in (f"block.{index}", f"block.{index}.experts") for unit in by_layer.get(name, ())]
        for index in range(len(paths))
    ]
    sole_users = [_is_sole_user(path, of_block, owners, reads) for path, of_block in zip(paths, units, strict=True)]
    own = [
        [] if _is_read_outside(path, of_block, reads, shared) else of_block
        for path, of_block in zip(paths, units, strict=True)
    ]
    return [
        GatheredGroups(here, before, after, is_sole)
        for here, before, after, is_sole in zip(own, [[], *own], [*own[1:], []], sole_users)
    ]


def _pending_groups(plan: Plan, blocks: int, by_layer: Mapping[str, Sequence[FlatParamGroup]]) -> list[GatheredGroups]:
    """Returns for each block the parameter groups whose overlapped all-gather its wrapper waits for. The last block
    also waits for all groups outside of the blocks, and if blocks are compiled, each does: compiled code must not
    wait."""
    names = [(f"block.{index}", f"block.{index}.experts") for index in range(blocks)]
    of_blocks = {name for pair in names for name in pair}
    outside = [name for name in by_layer if name not in of_blocks]
    return [
        GatheredGroups(
            pending=[
                weakref.ref(unit.weights)
                for name in (*(outside if plan.compile or pair == names[-1] else ()), *pair)
                for unit in by_layer.get(name, ())
            ]
        )
        for pair in names
    ]


def _mark_gathered(groups: Sequence[GatheredGroups]) -> list[GatheredGroups]:
    """Marks each parameter group as gathered by wrappers. Returns `groups`, with `is_tied` set where an earlier wrapper
    gathers one of the parameter groups too."""
    marked = []
    for each in groups:
        gathered_before = [unit.gather_for_use() for unit in each.units]
        marked.append(replace(each, is_tied=any(gathered_before)))
    return marked


def _outer_modules(
    plan: Plan,
    model: nn.Module,
    graph: ModelGraph,
    by_layer: dict[str, list[FlatParamGroup]],
    table: Mapping[str, Sequence[str]],
    reads: WeightUses,
) -> list[tuple[nn.Module, list[FlatParamGroup]]]:
    """Returns the modules outside of the blocks to wrap at ZeRO 3, each with its parameter groups. Such a module
    contains all parameters of a layer.

    If code outside of the module also reads one of these parameters (`F.linear(x, table.weight)`), the module is left
    out, and the groups of the layer stay gathered during the step.
    """
    found = []
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
            # A stage may end inside of a module that contains blocks, so such a module gets no wrapper, and its
            # parameters stay gathered during the step.
            continue
        if (
            path
            and module is not None
            and not isinstance(
                module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict | StagePlaceholder
            )
        ):
            found.append((module, units))
    return found


def _is_read_outside(
    block: str, units: Sequence[FlatParamGroup], reads: WeightUses, shared: Mapping[str, Sequence[str]]
) -> bool:
    """Returns whether a module outside of the block with path `block` reads a parameter of the groups `units`.

    `shared`: for each module with several paths, all of them (`_shared_modules`).
    """
    readers = {reader.path for unit in units for name in unit.parameters for reader in reads.get(name, ())}
    return any(not is_within(path, (block,)) for reader in readers for path in shared.get(reader, (reader,)))


def _shared_modules(model: nn.Module) -> dict[str, list[str]]:
    """Returns all paths of each module that has several paths. The key is the first path, because the analysis records
    reads under this path."""
    paths: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[id(module)].append(path)
    return {first: [first, *others] for first, *others in paths.values() if others}


def _is_sole_user(
    block: str, units: Sequence[FlatParamGroup], owners: Mapping[int, Sequence[str]], reads: WeightUses
) -> bool:
    """Returns whether no module outside of the block with path `block` contains or reads a parameter of the groups
    `units`. `owners`: the paths of the modules that contain each parameter, by `id(parameter)`."""
    parameters = [(name, parameter) for unit in units for name, parameter in unit.parameters.items()]
    return all(
        is_within(path, (block,))
        for name, parameter in parameters
        for path in (*owners[id(parameter)], *(reader.path for reader in reads.get(name, ())))
    )


def _embeddings_of_table(model: nn.Module, graph: ModelGraph) -> list[str]:
    """Returns the path of every module whose weight is that of the vocabulary embedding. For example, the embeddings of
    an encoder and of a decoder may share this weight."""
    found = model.get_submodule(graph.embedding) if graph.embedding else None
    weight = found._parameters.get("weight") if found is not None else None
    return [
        path
        for path, module in model.named_modules()
        if weight is not None
        and (path == graph.embedding or (isinstance(module, nn.Embedding) and module.weight is weight))
    ]


def _common_path(paths: set[str]) -> str:
    """Returns the longest common prefix of `paths`, dotted module paths.

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


def hidden_functions(
    context: ParallelContext, stage_blocks: int, graph: ModelGraph, sequence: ContextState | None
) -> tuple[dict[int, HiddenFunction], dict[int, HiddenFunction]]:
    """Returns two dicts, by the index of a block: functions of the hidden state that run before the block, and
    functions that run after it.

    Sequence parallelism cuts the hidden state before the first block, and gathers it after the last block. Context
    parallelism also cuts the hidden state before the first block. If the layers between the blocks and the head need
    the full length, context parallelism pads the hidden state after the last block.

    `stage_blocks`: the number of blocks in all stages.
    """
    before: dict[int, HiddenFunction] = {}
    after: dict[int, HiddenFunction] = {}
    if context.plan.sequence_parallel:
        region = SequenceParallelRegion(context.tp)
        before[0], after[stage_blocks - 1] = region.enter, region.leave
    if sequence is not None:
        last = graph.count - 1
        before[0] = _compose(sequence.cut_hidden, before.get(0))
        after[last] = _compose(after.get(last), sequence.place_hidden)
    return before, after


def cut_head_input(model: nn.Module, graph: ModelGraph, sequence: ContextState) -> None:
    """Cuts the input of the head along the sequence, if the layers before the head need the full sequence."""
    if sequence.placed and not isinstance(head := model.get_submodule(graph.head or ""), StagePlaceholder):
        sequence.cut_before(head)


def _compose(*functions: HiddenFunction | None) -> HiddenFunction:
    """Returns a function that applies `functions` in order and skips None."""

    def apply_all(hidden: torch.Tensor) -> torch.Tensor:
        for function in functions:
            hidden = hidden if function is None else function(hidden)
        return hidden

    return apply_all
