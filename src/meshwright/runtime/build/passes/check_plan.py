"""The build pass that checks the plan and the precision recipe against the structure of the model."""

from __future__ import annotations

from textwrap import shorten

import torch
from torch import nn

from meshwright.analysis.batch_coupling import find_batch_norm
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.nf4 import is_nf4_weight
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.compile import check_compiler
from meshwright.runtime.engine import check_batch_norm
from meshwright.runtime.expert_parallel.token_dispatcher import check_expert_plan
from meshwright.runtime.tensor_parallel.random import has_dropout
from meshwright.spec.constraints import block_count_violations, check_supported
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe
from meshwright.spec.workload_constraints import diloco_violations


@build_pass(reads=("model", "base", "recipe", "graph"), writes=("batch_norm",))
def check_plan(build: Build) -> None:
    """Checks that the model can be trained under the plan. Runs before the first pass that changes the model.

    Raises:
        InputError: The model cannot be trained under the plan.
    """
    plan = build.base.plan
    check_supported(plan, build.recipe)
    _check_graph(build.graph, plan)
    _check_recipe(build.model, plan, build.base.device, build.recipe)
    for fault in diloco_violations(plan, build.recipe.local) if build.recipe.local is not None else ():
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=fault.message))
    build.batch_norm = find_batch_norm(build.model)
    check_batch_norm(build.batch_norm, plan, 1)


def _check_graph(graph: ModelGraph, plan: Plan) -> None:
    """Checks that the structure of the model supports the parallel degrees of the plan."""
    _check_tensor_parallel(graph, plan)
    if plan.zero == 3 and (written := graph.unsupported.get("gathering")):
        raise InputError(
            Message(
                "plan {plan}: the forward writes to {written}, and ZeRO 3 would lose the write, because it "
                "all-gathers the weights for each forward: use z2 at most, or do not write to {written} in forward",
                plan=plan.name,
                written=written,
            )
        )
    if plan.stages > 1 and (called := graph.unsupported.get("stages")):
        text = mark_msgid("plan {plan}: {called}, but pipeline stages must begin and end between blocks: use pp1")
        raise InputError(Message(text, plan=plan.name, called=called))
    if plan.stages > 1 and graph.blocks is None:
        raise InputError(
            Message(
                "plan {plan}: {stages} stages need a repeated list of blocks to cut between; none was found: use pp1",
                plan=plan.name,
                stages=plan.stages,
            )
        )
    if plan.stages == 1:
        plan.stage_layers(max(graph.count, 1))
    for fault in block_count_violations(plan, max(graph.count, 1)):
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=fault.message))
    check_expert_plan(graph, plan)


def _check_tensor_parallel(graph: ModelGraph, plan: Plan) -> None:
    """With several tensor ranks, checks that the model has a tensor-parallel region or experts to shard, and that the
    analysis has verified the splits with real values."""
    if plan.tp > 1 and not (graph.regions or graph.experts):
        failed = graph.unsupported.get("run", "")
        reason = failed or graph.unsupported.get("tensors", "")
        why = Message(" ({line})", line=shorten(reason, 240, placeholder=" ...")) if reason else ""
        way = Message("give parallelize an example batch, or use tp1") if failed else Message("use tp1")
        raise InputError(
            Message(
                "plan {plan}: tp({tp}) needs a model with attention or feed-forward pairs to shard; this one has "
                "none{why}: {way}",
                plan=plan.name,
                tp=plan.tp,
                why=why,
                way=graph.unsupported.get("remedy", way),
            )
        )
    if plan.tp > 1 and (unproven := graph.unsupported.get("proof")):
        way = Message("give parallelize an example batch that the model can run, or use tp1")
        raise InputError(
            Message(
                "plan {plan}: tp({tp}): {unproven}: {way}",
                plan=plan.name,
                tp=plan.tp,
                unproven=unproven,
                way=graph.unsupported.get("remedy", way),
            )
        )


def _check_recipe(model: nn.Module, plan: Plan, device: torch.device, recipe: Recipe) -> None:
    """Checks the compiler, and that all parameters have real floating-point dtypes. With exact sums (`recipe.exact`),
    also refuses loss scaling, and dropout, because its random numbers depend on the number of ranks."""
    check_compiler(plan, device)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise InputError(
                Message(
                    "{name} {shape} is complex, but weights are trained in the real dtype of the precision: store it "
                    "as a real parameter with a last dimension of 2, and call torch.view_as_complex on it in forward",
                    name=name,
                    shape=tuple(parameter.shape),
                )
            )
        if not parameter.is_floating_point() and not is_nf4_weight(model, name):
            raise InputError(
                Message(
                    "{name} {shape} is a parameter of dtype {dtype}, but weights are stored in the dtype of the "
                    "precision, which would round it: make it a buffer (register_buffer)",
                    name=name,
                    shape=tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                )
            )
    if not recipe.exact:
        return
    if recipe.loss_scaling:
        raise InputError(
            Message(
                "exact: {recipe} scales the loss, but exact sums need unscaled gradients; use bf16 or fp32",
                recipe=recipe.name,
            )
        )
    if has_dropout(model):
        raise InputError(
            Message(
                "exact: the model has dropout, whose random numbers depend on the number of ranks; set its dropout "
                "rates to 0"
            )
        )
