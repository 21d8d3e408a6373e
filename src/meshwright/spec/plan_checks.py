"""Checks the fields of a plan against each other. `Plan` runs these checks on construction; each raises ValueError."""

from __future__ import annotations

from typing import Any

from meshwright.core.messages import Message, alternatives
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    EXCLUSIVE_OFFLOADS,
    MESH_AXES,
    PARAMETER_OFFLOADS,
    PER_BLOCK_RECOMPUTE,
    ContextParallelMethod,
    Offload,
    Recompute,
    offloads_states,
    offloads_weights,
)
from meshwright.spec.schedules.schedule import offered_schedules


def _check_micro_batch_sizes(plan: Any) -> None:
    """Checks a plan whose replicas have unequal micro-batch sizes."""
    sizes = plan.micro_batch_sizes
    if not sizes:
        return
    if len(sizes) != plan.dp or plan.dp < 2 or min(sizes) < 1:
        raise ValueError(
            Message(
                "micro-batch sizes {list} must give each of dp({dp}) replicas at least one sequence, and need two "
                "replicas or more",
                list=list(sizes),
                dp=plan.dp,
            )
        )
    if max(sizes) != plan.micro_batch or min(sizes) == plan.micro_batch:
        raise ValueError(
            Message(
                "micro-batch sizes {list}: micro_batch({micro_batch}) must be the largest of "
                "different sizes; if all sizes are equal, write only mb",
                list=list(sizes),
                micro_batch=plan.micro_batch,
            )
        )
    if plan.ep > 1:
        raise ValueError(
            Message(
                "micro-batch sizes: expert ranks of replicas with different micro-batches would "
                "exchange different numbers of tokens; use ep1"
            )
        )


def _check_recompute(plan: Any) -> None:
    """Checks the number of blocks that recompute, and the recompute of the other blocks."""
    if plan.recompute_layers and plan.recompute not in PER_BLOCK_RECOMPUTE:
        raise ValueError(
            Message(
                "recompute_layers {recompute_layers} needs full or selective recompute: add recompute full or sac",
                recompute_layers=plan.recompute_layers,
            )
        )
    whole = plan.recompute == Recompute.full and plan.recompute_layers > 0
    if plan.recompute_rest not in ((Recompute.none, Recompute.sac) if whole else (Recompute.none,)):
        raise ValueError(
            Message(
                "recompute_rest {recompute_rest} applies to the blocks after the first blocks with "
                "full recompute: write rc-full8+sac",
                recompute_rest=plan.recompute_rest,
            )
        )


def _check_offload(plan: Any) -> None:
    """Checks the list of offloads, and the number of blocks that offload activations."""
    if list(plan.offload) != sorted(set(plan.offload), key=list(Offload).index):
        raise ValueError(
            Message(
                "offload {offload} must name each of {offload_2} at most once, in this order",
                offload=[str(what) for what in plan.offload],
                offload_2=", ".join(Offload),
            )
        )
    for what, places in EXCLUSIVE_OFFLOADS.items():
        if set(places) <= set(plan.offload):
            raise ValueError(Message("offload names {what} twice: on the host, or in files", what=what))
    offloaded = [what for what in plan.offload if what in PARAMETER_OFFLOADS]
    if offloaded and plan.zero < 3:
        raise ValueError(
            Message(
                "off-{offloaded}: offloaded weights are gathered layer by layer, as at ZeRO 3: add z3 (on one rank "
                "too: dp1.z3)",
                offloaded=offloaded[0],
            )
        )
    if Offload.gradients in plan.offload and (plan.zero < 2 or not offloads_states(plan.offload)):
        raise ValueError(
            Message(
                "off-gradients: the host accumulates gradient shards for its optimizer update: add z2 or z3, and "
                "off-optimizer (dp1.z2.off-optimizer.off-gradients)"
            )
        )
    sent = next((what for what in plan.offload if what in ACTIVATION_OFFLOADS), None)
    if plan.offload_layers and sent is None:
        raise ValueError(
            Message(
                "offload_layers {offload_layers} needs offload of activations: write off-activations{offload_layers}",
                offload_layers=plan.offload_layers,
            )
        )
    if plan.offload_layers and plan.recompute_layers not in (0, plan.offload_layers):
        raise ValueError(
            Message(
                "off-{sent}{offload_layers}: recompute must apply to all blocks of a stage, or to as "
                "many first blocks as offload of activations; it applies to {recompute_layers}, "
                "offload to {offload_layers}",
                sent=sent,
                offload_layers=plan.offload_layers,
                recompute_layers=plan.recompute_layers,
            )
        )


def _check_offload_percent(plan: Any) -> None:
    """Checks the percentages of offloaded states and weights."""
    if plan.offload_share < 100 and not offloads_states(plan.offload):
        raise ValueError(
            Message(
                "offload_share {offload_share} needs offload of optimizer states: write "
                "off-optimizer{offload_share}, or with -disk",
                offload_share=plan.offload_share,
            )
        )
    if plan.weights_share < 100 and not offloads_weights(plan.offload):
        raise ValueError(
            Message(
                "weights_share {weights_share} needs offload of weights: write "
                "off-parameters{weights_share}, or with -disk",
                weights_share=plan.weights_share,
            )
        )


def _check_degrees(plan: Any) -> None:
    """Checks the ZeRO stage and sequence parallelism against the parallel degrees."""
    if plan.zero == 0 and plan.dp_shard > 1:
        raise ValueError(Message("ZeRO 0 shards nothing: write dp{dp} without a shard group, or z1 to z3", dp=plan.dp))
    if plan.sequence_parallel and plan.tp == 1:
        raise ValueError(Message("sequence parallelism (sp) splits activations over tensor ranks and needs tp > 1"))


def _check_stages(plan: Any) -> None:
    """Checks the schedule, the number of virtual stages, and the blocks of each stage."""
    rules = plan.schedule_rules
    least = rules.stages_per_rank
    if plan.virtual_stages < least or (plan.virtual_stages > least and not rules.any_stages_per_rank):
        needs = Message("{least} or more", least=least) if rules.any_stages_per_rank else least
        raise ValueError(
            Message(
                "schedule {schedule} with {virtual_stages} virtual stages: it needs {needs}",
                schedule=plan.schedule,
                virtual_stages=plan.virtual_stages,
                needs=needs,
            )
        )
    if plan.virtual_stages > 1 and plan.pp == 1:
        raise ValueError(Message("virtual stages need pp > 1"))
    if rules.listed != bool(plan.actions) or (plan.actions and len(plan.actions) != plan.pp):
        raise ValueError(
            Message(
                "schedule {schedule} with actions for {count} of pp({pp}) ranks: schedule actions needs actions for "
                "all ranks, other schedules accept none",
                schedule=plan.schedule,
                count=len(plan.actions),
                pp=plan.pp,
            )
        )
    if plan.layers_per_stage and len(plan.layers_per_stage) != plan.stages:
        raise ValueError(
            Message(
                "layers_per_stage names {count} stages, the plan has pp({pp}) * virtual({virtual_stages}) = {stages}",
                count=len(plan.layers_per_stage),
                pp=plan.pp,
                virtual_stages=plan.virtual_stages,
                stages=plan.stages,
            )
        )
    if plan.layers_per_stage and min(plan.layers_per_stage) < 1:
        raise ValueError(Message("every stage needs at least one block"))


def _check_axes(plan: Any) -> None:
    """Checks context parallelism, the placement on groups of nodes, and the order of axes."""
    if plan.context == ContextParallelMethod.ulysses and plan.cp == 1:
        raise ValueError(Message("ulysses is a method of context parallelism and needs cp > 1"))
    if plan.ulysses and (
        plan.context == ContextParallelMethod.ring
        or plan.ulysses < 2
        or plan.cp % plan.ulysses
        or plan.ulysses == plan.cp
    ):
        raise ValueError(
            Message(
                "ulysses{ulysses}: the number of ranks that exchange heads must be at least 2, smaller than cp({cp}), "
                "and divide it",
                ulysses=plan.ulysses,
                cp=plan.cp,
            )
        )
    if plan.placement and (len(plan.placement) != plan.pp or not plan.schedule_rules.heterogeneous):
        allowed = alternatives(rules.name for rules in offered_schedules() if rules.heterogeneous)
        raise ValueError(
            Message(
                "placement names the groups of {count} of pp({pp}) ranks; it must name one for each rank, and needs "
                "schedule {allowed}",
                count=len(plan.placement),
                pp=plan.pp,
                allowed=allowed,
            )
        )
    if sorted(plan.axes) != sorted(MESH_AXES):
        raise ValueError(
            Message(
                "axes {list} must name each of {mesh_axes} once", list=list(plan.axes), mesh_axes=", ".join(MESH_AXES)
            )
        )
    if plan.placement and plan.axes[0] != "pp":
        raise ValueError(
            Message(
                "placement gives a group's devices to whole pipeline ranks: axes {list} must begin with pp",
                list=list(plan.axes),
            )
        )


def _check_uneven_micro_batches(plan: Any) -> None:
    """[Note: uneven accumulation] Checks a plan whose replicas have unequal numbers of micro-batches. These replicas
    must synchronize only once per step, because a collective in each micro-batch would wait forever."""
    if not plan.shares:
        return
    if len(plan.shares) != plan.dp or plan.dp < 2 or min(plan.shares) < 1:
        raise ValueError(
            Message(
                "shares {list} must give each of dp({dp}) replicas at least one micro-batch, and need two replicas or "
                "more",
                list=list(plan.shares),
                dp=plan.dp,
            )
        )
    if plan.zero > 1 or plan.ep > 1:
        raise ValueError(
            Message(
                "shares: replicas with different numbers of micro-batches may synchronize only once "
                "per step: use z0 or z1, and ep1"
            )
        )
    if not plan.schedule_rules.accepts_any:
        *first, last = (rules.name for rules in offered_schedules() if rules.accepts_any)
        raise ValueError(
            Message(
                "shares: schedule {schedule} needs the same number of micro-batches in every replica; use {first} or "
                "{last}, or leave shares out",
                schedule=plan.schedule,
                first=", ".join(first),
                last=last,
            )
        )


def _check_shard_weights(plan: Any) -> None:
    """Checks the weights of a plan with unequal ZeRO shards."""
    weights = plan.shard_weights
    if weights and (len(weights) != plan.shards or plan.shards < 2 or min(weights) < 1):
        raise ValueError(
            Message(
                "shard weights {list} must give each of the {shards} ranks of a shard group at least 1, and need two "
                "ranks or more at z1 to z3",
                list=list(weights),
                shards=plan.shards,
            )
        )
    if weights and plan.ep > 1:
        raise ValueError(Message("shard weights: with expert parallelism, experts have separate shard groups; use ep1"))


PLAN_CHECKS = (
    _check_micro_batch_sizes,
    _check_recompute,
    _check_offload,
    _check_offload_percent,
    _check_degrees,
    _check_stages,
    _check_axes,
    _check_uneven_micro_batches,
    _check_shard_weights,
)
"""The checks in order. A plan reports the error of the first check that fails."""
