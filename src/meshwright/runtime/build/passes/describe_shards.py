"""The build pass that describes how each tensor is divided over ranks, before the model is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.assignment import StageLayer
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.non_tensor_state import EXTRA_STATE_KEY, ExtraState
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.shard_table import ShardSpec, ShardTable


@build_pass(
    reads=("model", "deferred", "partition", "context", "experts"),
    writes=("shards", "extra_state", "uninitialized", "trained"),
)
def describe_shards(build: Build) -> None:
    """Makes the shard table of parameters and buffers, the state-dict entries that are not parameters, and the names of
    trained and of uninitialised parameters.

    A parameter is uninitialised if it is on the meta device without a deferred initialisation.
    """
    model, partition = build.model, build.partition
    build.extra_state = _find_extra_state(model, partition.stage_graph, partition.table, partition.writers)
    build.shards = _make_shard_table(
        model, partition.graph, build.context, build.experts, partition.stages, build.extra_state
    )
    build.trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    build.uninitialized = frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and build.deferred.seen(parameter) is None
    )


def _make_shard_table(
    model: nn.Module,
    graph: ModelGraph,
    context: ParallelContext,
    experts: EpGroups,
    stages: Mapping[str, tuple[int, ...]],
    extra_state: ExtraState,
) -> ShardTable:
    """Returns the table of this rank's shards: of all parameters, and of the buffers in the state dict. Tensor ranks
    split dense tensors. Expert ranks divide the experts, and tensor ranks may split the tensors of each expert."""
    coords, tp = context.coords, context.plan.tp
    params = {}
    for name, parameter in model.named_parameters():
        if name in experts.dealt:
            split = graph.splits.get(name) if experts.shares > 1 else None
            params[name] = ShardSpec(
                parameter.shape, split, experts.place.share, experts.shares, True, experts.place.expert, stages[name]
            )
        else:
            split = graph.splits.get(name) if tp > 1 else None
            is_packed = parameter.dtype == torch.uint8
            params[name] = ShardSpec(parameter.shape, split, coords.tp, tp, stages=stages[name], is_packed=is_packed)
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {
        name: ShardSpec(
            buffer.shape,
            graph.splits.get(name) if tp > 1 else None,
            coords.tp,
            tp,
            stages=(extra_state.buffer_stages[name],),
        )
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name in saved
    }
    return ShardTable(params, buffers)


def _find_extra_state(
    model: nn.Module, graph: ModelGraph, table: Sequence[StageLayer], writers: Mapping[str, int]
) -> ExtraState:
    """Returns the entries of the state dict that are not parameters.

    A buffer belongs to the stage that updates it (`writers`). A buffer that no stage updates belongs to the stage of
    the parameters in its module, or in the nearest enclosing module with parameters. If these parameters are on several
    stages, the order of registration decides: buffers of modules after the blocks belong to the last stage, all other
    buffers to stage 0.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True).keys()
    second = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in saved
    }
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in saved]
    stage_of = {name: layer.stage for layer in table for name in layer.parameters}
    order = [name for name, _ in model.named_modules()]
    last = max(
        (
            at
            for at, name in enumerate(order)
            if graph.blocks and f"{name}.".startswith(f"{graph.block(graph.count - 1)}.")
        ),
        default=0,
    )

    def stage(name: str) -> int:
        owner = name.rpartition(".")[0]
        around = owner
        while around:
            stages = {at for parameter, at in stage_of.items() if parameter.startswith(f"{around}.")}
            if stages:
                break
            around = around.rpartition(".")[0]
        if around and len(stages) == 1:
            return stages.pop()
        return max(stage_of.values(), default=0) if order.index(owner) > last else 0

    return ExtraState(
        {name: one for name, one in second.items() if name != one},
        {**{name: stage(name) for name in buffers}, **writers},
        tuple(name for name in saved if name.rpartition(".")[2] == EXTRA_STATE_KEY),
    )
