"""Checks whether a plan is legal for a model, a batch and a number of devices. The planner, the parser of a user's
plan, and the runtime apply these rules, which are pure functions.

A broken rule is a `Violation`. It has a short reason, identical for all plans that break the rule, and one line with
the numbers. The rules are checked before ranks start, because ranks with mismatched tensor sizes abort inside gloo
without a Python error.

The module also lists what the runtime of this version supports. The planner also estimates unsupported plans, and marks
them as plan-only. `train` searches only supported plans.

>>> from meshwright.spec.plan import parse_plan; from meshwright.spec.plan_name import format_number_list
>>> is_supported(parse_plan("dp8.tp2.z1.off-optimizer25")), is_supported(parse_plan("dp4.z3.off-parameters-disk"))
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    DEFAULT_SCHEDULE,
    DISK_OFFLOADS,
    OPTIMIZER_OFFLOADS,
    PARAMETER_OFFLOADS,
    ContextParallelMethod,
    Offload,
)
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, round_equation, shares_equation
from meshwright.spec.plan_name import is_open, offload_name_parts
from meshwright.spec.precision import Recipe
from meshwright.spec.schedules.schedule import schedule_names
from meshwright.spec.violation import Violation
from meshwright.spec.workload_constraints import unsupported_float8, workload_violations


def world_size_violations(plan: Plan, devices: int) -> Iterator[Violation]:
    """Checks that the world size pp x dp x cp x tp equals the number of devices. Also checks that ep divides dp_shard x
    cp x tp."""
    if plan.world != devices:
        factors = [
            (axis, getattr(plan, axis))
            for axis in ("dp", "tp", "pp", "cp")
            if axis in ("dp", "tp", "pp") or plan.cp > 1
        ]
        product = " * ".join(f"{axis}({degree})" for axis, degree in factors)
        yield Violation(
            "the product of degrees is not the number of devices",
            Message(
                "{product} = {world} but the cluster has {devices} devices: change the plan or the cluster",
                product=product,
                world=plan.world,
                devices=devices,
            ),
        )
    inner = plan.dp_shard * plan.cp * plan.tp
    if inner % plan.ep:
        yield Violation(
            "ep does not divide",
            Message(
                "ep({ep}) does not divide dp_shard({dp_shard}) * cp({cp}) * tp({tp}) = {inner}",
                ep=plan.ep,
                dp_shard=plan.dp_shard,
                cp=plan.cp,
                tp=plan.tp,
                inner=inner,
            ),
        )


def placement_violations(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Checks a plan that places pipeline ranks on groups of nodes: the pipeline ranks on a group must use all devices
    of the group."""
    each = plan.world // plan.pp
    for group in sorted(set(plan.placement)):
        if group >= len(cluster.groups):
            yield Violation(
                "no such group",
                Message(
                    "placement names group {group}, but the cluster has only the groups 0 to {count}",
                    group=group,
                    count=len(cluster.groups) - 1,
                ),
            )
            continue
        devices, ranks = cluster.groups[group].nodes * cluster.groups[group].devices, plan.placement.count(group)
        if ranks * each != devices:
            yield Violation(
                "ranks do not fill a group",
                Message(
                    "placement: {ranks} pipeline ranks of {each} devices need {ranks_2} devices of group {group}, "
                    "which has {devices}",
                    ranks=ranks,
                    each=each,
                    group=group,
                    ranks_2=ranks * each,
                    devices=devices,
                ),
            )


def tensor_parallel_violations(
    plan: Plan, divisible: Mapping[str, int], tensor_parallel: bool = True, vocabulary: int = 0
) -> Iterator[Violation]:
    """Checks the degree of tensor parallelism. tp must divide each size in `divisible` (name to size): `heads`,
    `kv_heads`, `ffn`. The number of key-value heads may divide tp instead. A sharded `vocabulary` (0: not sharded) may
    be uneven, but no shard may be empty. `tensor_parallel` is False if no rule shards the layers of the model."""
    if plan.tp == 1:
        return
    if not tensor_parallel:
        yield Violation(
            "the model has no tensor-parallel rule",
            Message("tp({tp}): no rule shards the layers of this model; use tp 1", tp=plan.tp),
        )
        return
    for what, size in divisible.items():
        if size % plan.tp and not (what == "kv_heads" and plan.tp % size == 0):
            yield Violation(
                f"tp does not divide {what}",
                Message("tp({tp}) does not divide {what}({size})", tp=plan.tp, what=what, size=size),
            )
    if 0 < vocabulary <= -(-vocabulary // plan.tp) * (plan.tp - 1):
        yield Violation(
            "a tensor rank has no part of the vocabulary",
            Message(
                "tp({tp}) leaves no part of the vocabulary({vocabulary}) to the last tensor rank: use a smaller tp",
                tp=plan.tp,
                vocabulary=vocabulary,
            ),
        )


def expert_parallel_violations(plan: Plan, experts: int) -> Iterator[Violation]:
    """Checks that ep divides the number of experts. A dense model has 0 experts and needs ep 1."""
    if plan.ep > 1 and not experts:
        yield Violation("the model has no experts", Message("ep({ep}): the model has no experts; use ep 1", ep=plan.ep))
    elif plan.ep > 1 and experts % plan.ep:
        yield Violation(
            "ep does not divide the experts",
            Message("ep({ep}) does not divide experts({experts})", ep=plan.ep, experts=experts),
        )


def context_parallel_violations(plan: Plan, divisible: Mapping[str, int]) -> Iterator[Violation]:
    """Checks for Ulysses that (number of Ulysses ranks) x tp divides the number of heads. If there are too few
    key-value heads, they are replicated."""
    heads, ranks = divisible.get("heads", 0), plan.ulysses_ranks * plan.tp
    if plan.context == ContextParallelMethod.ulysses and heads % ranks:
        yield Violation(
            "ulysses does not divide heads",
            Message(
                "ulysses({ulysses_ranks}) * tp({tp}) = {ranks} does not divide heads({heads})",
                ulysses_ranks=plan.ulysses_ranks,
                tp=plan.tp,
                ranks=ranks,
                heads=heads,
            ),
        )


def without_offload(plan: Plan) -> Plan:
    """Returns `plan` with no tensors on the host or on a disk."""
    return plan.but(offload=(), offload_share=100, weights_share=100, offload_layers=0)


def offload_violations(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Checks that the cluster has a link to the host, or to a disk, for the tensors that the plan offloads."""
    for what in plan.offload:
        if what in DISK_OFFLOADS and not cluster.storage_bandwidth:
            yield Violation(
                "no disk",
                Message(
                    "off-{what}: the cluster names no storage_bandwidth of its nodes; `meshwright probe --save` "
                    "measures this machine's",
                    what=what,
                ),
            )
        elif what not in DISK_OFFLOADS and not cluster.host_bandwidth:
            yield Violation(
                "no link to the host",
                Message(
                    "off-{what}: the cluster names no host_bandwidth between its devices and their hosts; CPU ranks "
                    "already use host memory: write the plan without offload, {plan}",
                    what=what,
                    plan=without_offload(plan).name,
                ),
            )


def stage_violations(plan: Plan, blocks: int, against: str = "") -> Iterator[Violation]:
    """Checks that every stage has a block, and that a manual stage split covers all blocks. `against` is the reason why
    the model cannot be cut between its blocks, or empty if it can be cut."""
    if plan.stages > 1 and against:
        yield Violation(
            "the model cannot be cut between its blocks",
            Message(
                "pp({pp}): {against}, but pipeline stages must begin and end between blocks: use pp1",
                pp=plan.pp,
                against=against,
            ),
        )
    if plan.layers_per_stage and sum(plan.layers_per_stage) != blocks:
        total = sum(plan.layers_per_stage)
        yield Violation(
            "stages miss blocks",
            Message(
                "layers_per_stage {list} sums to {total}, the model has {blocks} blocks",
                list=list(plan.layers_per_stage),
                total=total,
                blocks=blocks,
            ),
        )
    elif plan.stages > 1 and blocks < plan.stages:
        yield Violation(
            "more stages than blocks",
            Message(
                "pp({pp}) * virtual({virtual_stages}) = {stages} stages need at least one block each, the model has "
                "{blocks} blocks",
                pp=plan.pp,
                virtual_stages=plan.virtual_stages,
                stages=plan.stages,
                blocks=blocks,
            ),
        )


def block_count_violations(plan: Plan, blocks: int) -> Iterator[Violation]:
    """Checks that the number of blocks that recompute or offload activations is at most the number of blocks of the
    largest stage."""
    if not (plan.recompute_layers or plan.offload_layers) or any(stage_violations(plan, blocks)):
        return
    most = max(plan.stage_layers(max(blocks, 1)))
    sent = next((what for what in plan.offload if what in ACTIVATION_OFFLOADS), "")
    for what, count in ((f"rc-{plan.recompute}", plan.recompute_layers), (f"off-{sent}", plan.offload_layers)):
        named = f"{what}{count}"
        if count > most:
            yield Violation(
                "more blocks than a stage has",
                Message(
                    "{named} counts the blocks of one stage, which has at most {most}: write {what} for all blocks",
                    named=named,
                    most=most,
                    what=what,
                ),
            )


def batch_violations(plan: Plan, batch: int) -> Iterator[Violation]:
    """Checks that the batch is a whole number of micro-batches on every replica, and that the schedule supports this
    number."""
    rows, equation = plan.rows_per_round, round_equation(plan)
    each = equation.partition(" = ")[0]
    if plan.shares and plan.uneven_batch != batch:
        yield Violation(
            "shares do not sum to the batch",
            Message(
                "shares: {shares_equation} but the batch is {batch}", shares_equation=shares_equation(plan), batch=batch
            ),
        )
        return
    if plan.shares:
        return
    if batch % rows:
        wrong = Message("batch {batch} is not a multiple of {round_equation}", batch=batch, round_equation=equation)
        yield Violation("batch does not divide", _no_size_divides(plan, batch) if is_open(plan) else wrong)
        return
    rules, count = plan.schedule_rules, batch // rows
    if count % (multiple := rules.multiple_of(plan.pp)):
        named = f"pp({multiple})" if rules.in_rounds else multiple
        yield Violation(
            "interleaving does not divide",
            Message(
                "{rules}: {count} micro-batches are not a multiple of {named}; use a batch of {rows} sequences or a "
                "multiple of it",
                rules=rules.name,
                count=count,
                named=named,
                rows=rows * multiple,
            ),
        )
    elif count < (least := rules.min_micro_batches(plan.pp)):
        yield Violation(
            "schedule needs more micro-batches",
            Message(
                "{rules}: {count} micro-batches are fewer than the {least} that pp({pp}) needs; {default_schedule} "
                "takes any number",
                rules=rules.name,
                count=count,
                least=least,
                pp=plan.pp,
                default_schedule=DEFAULT_SCHEDULE,
            ),
        )
    elif not rules.accepts(plan.pp, count):
        yield Violation(
            "the actions are for another batch",
            Message(
                "the actions are for {ordered_micro_batches} micro-batches, but batch {batch} / ({each}) is {count}",
                ordered_micro_batches=rules.ordered_micro_batches,
                batch=batch,
                each=each,
                count=count,
            ),
        )


def _no_size_divides(plan: Plan, batch: int) -> Message:
    """Returns why no micro-batch size of an open plan divides the batch: the replicas do not."""
    return Message(
        "batch {batch} is not a multiple of dp({dp}); use a batch of {dp} sequences or a multiple of it",
        batch=batch,
        dp=plan.dp,
    )


def batch_split_violations(plan: Plan, batch: int, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the plan does not divide a batch whose rows depend on each other, nor the rows of a replica if the
    loss compares the rows of all replicas."""
    against = model.against_division
    if against and (plan.dp > 1 or plan.micro_batch < batch):
        yield Violation(
            "rows of a batch depend on each other",
            Message("a batch must not be divided: {against}; use dp1.mb{batch}", against=against, batch=batch),
        )
    if model.gathered and (plan.pp > 1 or plan.shares or plan.micro_batch * plan.dp < batch):
        yield Violation(
            "the loss needs the whole batch",
            Message(
                "with gather='batch' a replica has one micro-batch and no pipeline stages; use mb{rows} without pp",
                rows=max(batch // plan.dp, 1),
            ),
        )


def check_batch_size(plan: Plan) -> int:
    """Returns the number of rows (sequences) of the batch in a comparison with one device: 2 x pp micro-batches for
    every replica, or the number that a custom schedule or unequal numbers of micro-batches prescribe."""
    return plan.uneven_batch or plan.rows_per_round * (plan.schedule_rules.ordered_micro_batches or 2 * plan.pp)


def half_sequence_length(plan: Plan, length: int) -> int:
    """Returns half of `length`, the tokens of a sequence, rounded down to a length that the plan can divide. Returns 0
    if this is less than 8.

    >>> from meshwright.spec.plan import parse_plan
    >>> half_sequence_length(parse_plan("tp4.sp"), 46), half_sequence_length(parse_plan("dp2"), 12)
    (20, 0)
    """
    divisor = math.lcm(plan.tp if plan.sequence_parallel else 1, 2 * plan.cp * plan.ulysses_ranks if plan.cp > 1 else 1)
    divisor = divisor * plan.tp if plan.sequence_parallel and plan.cp > 1 else divisor
    half = length // 2 // divisor * divisor
    return half if half >= max(8, divisor) else 0


def sequence_divisor(plan: Plan) -> int:
    """Returns the number by which a sequence length must be divisible for `plan` (`sequence_violations`).

    >>> from meshwright.spec.plan import parse_plan
    >>> [sequence_divisor(parse_plan(name)) for name in ("tp4.sp", "tp4.sp.cp2", "cp2", "dp2")]
    [4, 8, 4, 1]
    """
    tensor = plan.tp if plan.sequence_parallel else 1
    return math.lcm(tensor * (plan.cp if tensor > 1 else 1), 2 * plan.cp if plan.cp > 1 else 1)


def sequence_violations(plan: Plan, sequence: int, context: int = 0, against: str = "") -> Iterator[Violation]:
    """Checks the sequence length. Sequence parallelism cuts a sequence into tp chunks, context parallelism into 2 x cp
    chunks. With both, tp x cp must also divide the length. If the model has learned positions, their
    number `context` is the maximum length; 0 means no limit.

    `against` is the reason why the model's layers cannot compute on a chunk of the sequence, or empty if they can.
    """
    if plan.sequence_parallel and against:
        yield Violation(
            "sequence parallelism would be wrong",
            Message("sp: {against}; leave sequence parallelism out", against=against),
        )
    if plan.sequence_parallel and plan.cp == 1 and sequence % plan.tp:
        yield Violation(
            "tp does not divide the sequence",
            Message("sp: tp({tp}) does not divide sequence({sequence})", tp=plan.tp, sequence=sequence),
        )
    if plan.sequence_parallel and plan.cp > 1 and sequence % (plan.tp * plan.cp):
        product = plan.tp * plan.cp
        yield Violation(
            "tp does not divide the sequence",
            Message(
                "sp: tp({tp}) * cp({cp}) = {product} does not divide sequence({sequence})",
                tp=plan.tp,
                cp=plan.cp,
                product=product,
                sequence=sequence,
            ),
        )
    if plan.cp > 1 and sequence % (2 * plan.cp):
        yield Violation(
            "cp does not divide the sequence",
            Message(
                "2 * cp({cp}) = {value} does not divide sequence({sequence})",
                cp=plan.cp,
                value=2 * plan.cp,
                sequence=sequence,
            ),
        )
    if context and sequence > context:
        yield Violation(
            "the sequence is too long",
            Message(
                "sequence {sequence} is longer than the {value} positions that the model has",
                sequence=sequence,
                value=context,
            ),
        )


def plan_violations(job: Job, plan: Plan) -> Iterator[Violation]:
    """Yields a violation for every rule that `plan` breaks for `job`, simple rules first."""
    yield from (
        placement_violations(plan, job.cluster) if plan.placement else world_size_violations(plan, job.cluster.devices)
    )
    yield from tensor_parallel_violations(
        plan, job.model.divisible, job.model.tensor_parallel, job.model.shared_vocabulary
    )
    yield from expert_parallel_violations(plan, job.model.experts)
    yield from context_parallel_violations(plan, job.model.divisible)
    yield from offload_violations(plan, job.cluster)
    yield from stage_violations(plan, job.model.blocks, job.model.against_stages)
    yield from block_count_violations(plan, job.model.blocks)
    yield from sequence_violations(plan, job.workload.sequence, against=job.model.against_sequence)
    yield from batch_split_violations(plan, job.workload.batch, job.model)
    yield from batch_violations(plan, job.workload.batch)
    yield from workload_violations(plan, job.workload, job.cluster, job.model.layers, trains=False)


def validate_plan(job: Job, plan: Plan) -> None:
    """Raises InputError with the first violation of `plan` for `job`."""
    for fault in plan_violations(job, plan):
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=fault.message))


SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "schedule": schedule_names(),
    "offload": tuple(
        tuple(what for what in choice if what is not None)
        for choice in product(
            (None, *OPTIMIZER_OFFLOADS),
            (None, Offload.gradients),
            (None, *PARAMETER_OFFLOADS),
            (None, *ACTIVATION_OFFLOADS),
        )
    ),
}
"""The supported values of a plan's fields. Every field that is not listed supports all of its values."""


def unsupported_parts(plan: Plan, recipe: Recipe | None = None) -> tuple[str, ...]:
    """Returns the parts of the plan's name that this version does not support yet, in general or with the precision
    `recipe`; empty if it supports the plan."""
    said = {
        "schedule": str(plan.schedule),
        "offload": ".".join(offload_name_parts(plan)),
    }
    found = [said[name] for name, values in SUPPORTED_VALUES.items() if getattr(plan, name) not in values]
    if recipe is not None and (part := unsupported_float8(plan, recipe)):
        found.append(f"{recipe.name} with {part}")
    return tuple(found)


def check_supported(plan: Plan, recipe: Recipe) -> None:
    """Raises InputError if this version does not support the plan with the precision `recipe`."""
    if parts := unsupported_parts(plan, recipe):
        raise InputError(
            Message(
                "plan {plan}: {unsupported_parts} can be planned but cannot be trained yet; leave them out",
                plan=plan.name,
                unsupported_parts=", ".join(parts),
            )
        )


def is_supported(plan: Plan, recipe: Recipe | None = None) -> bool:
    """Returns whether this version supports the plan with the precision `recipe`."""
    return not unsupported_parts(plan, recipe)
