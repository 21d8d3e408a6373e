"""The build pass that runs, before the model is changed, the checks that later passes rely on."""

from __future__ import annotations

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.batch_loss import check_gather
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.expert_parallel.load_balancing import check_aux_loss, check_expert_bias, make_capacity_limiter
from meshwright.runtime.loss import LossHead, check_chunked_head
from meshwright.runtime.tensor_parallel.layers import check_divisible
from meshwright.spec.workload_constraints import UpdateProperties, update_violations


@build_pass(reads=("model", "hints", "recipe", "partition", "context", "experts", "sequence", "full_tensors"))
def check_shards(build: Build) -> None:
    """Checks sizes, experts, the loss, and the tensors that the optimizer needs as full tensors.

    Raises:
        InputError: A size is not divisible by the tensor-parallel degree. Or the plan does not support the loss, an
            expert module, or the optimizer's update rule for an expert's parameters. Or the model's router bias or
            expert capacity is invalid (expert_parallel/load_balancing.py).
    """
    model, graph, context = build.model, build.partition.graph, build.context
    plan, loss, sequence = context.plan, build.hints.get("loss"), build.sequence
    check_gather(build.hints.get("gather"), loss, plan, build.recipe)
    LossHead(model, loss, None, None if sequence is None else sequence.cut_labels)
    if context.tp is not None:
        check_divisible(model, build.experts.dense(graph).for_tp(plan.tp), plan.tp, plan.sequence_parallel)
    check_expert_bias(model, graph)
    make_capacity_limiter(model, sum(not experts.by_rows for experts in graph.experts), context)
    for experts in graph.experts if plan.ep > 1 else ():
        names = dict(model.get_submodule(experts.path).named_parameters(remove_duplicate=False))
        if not names.keys() >= set(experts.names):
            raise InputError(
                Message(
                    "{path} is wrapped by an adapter, and ep cannot distribute adapted experts: put adapters on "
                    "linear layers, or use ep1",
                    path=experts.path,
                )
            )
    check_chunked_head(graph, plan, loss is not None)
    check_aux_loss(model, loss, plan)
    for name in sorted(build.full_tensors.names & build.experts.dealt.keys()):
        for fault in update_violations(plan, UpdateProperties(build.recipe, experts=(name,))):
            raise InputError(fault.message)
