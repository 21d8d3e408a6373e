"""Checks whether a plan is legal for a model, a batch and a number of devices. The planner, the parser of a user's
plan, and the runtime before it starts ranks apply the same pure rules.

A broken rule is a `Violation`: a short reason, identical for all plans that break the rule, and one line with the
numbers. Without violations the plan can run. The rules apply before ranks start, because ranks with different sizes
abort inside gloo without a Python error.

The module also has the table of what the runtime of this version supports. The planner and the runtime both read it.
The planner also estimates plans that are not supported and marks them; `train` searches supported plans only.

>>> from meshwright.spec.plan import parse_plan; from meshwright.spec.plan_name import format_number_list
>>> is_supported(parse_plan("dp8.tp2.z1.off-optimizer25")), is_supported(parse_plan("dp4.z3.off-parameters-disk"))
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    DEFAULT_SCHEDULE,
    DISK_OFFLOADS,
    OPTIMIZER_OFFLOADS,
    PARAMETER_OFFLOADS,
    ContextParallelMethod,
    Offload,
    offloads_states,
    offloads_weights,
)
from meshwright.spec.job import Job
from meshwright.spec.model import LayerSpec
from meshwright.spec.plan import Plan, round_equation, shares_equation
from meshwright.spec.plan_name import offload_name_parts
from meshwright.spec.precision import DilocoConfig, Recipe
from meshwright.spec.schedules.schedule_registry import schedule_names
from meshwright.spec.workload import Workload


class Violation(NamedTuple):
    """The reason why a plan cannot run. `reason` groups plans; `message` is the line for this plan."""

    reason: str
    message: str


def world_size_violations(plan: Plan, devices: int) -> Iterator[Violation]:
    """Checks that the world size pp x dp x cp x tp is the number of devices, and that ep divides dp_shard x cp x tp."""
    if plan.world != devices:
        factors = [
            (axis, getattr(plan, axis))
            for axis in ("dp", "tp", "pp", "cp")
            if axis in ("dp", "tp", "pp") or plan.cp > 1
        ]
        product = " * ".join(f"{axis}({degree})" for axis, degree in factors)
        yield Violation(
            "degrees do not multiply to the devices", f"{product} = {plan.world} but the cluster has {devices} devices"
        )
    inner = plan.dp_shard * plan.cp * plan.tp
    if inner % plan.ep:
        yield Violation(
            "ep does not divide",
            f"ep({plan.ep}) does not divide dp_shard({plan.dp_shard}) * cp({plan.cp}) * tp({plan.tp}) = {inner}",
        )


def placement_violations(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Checks that a group of nodes with pipeline ranks is used completely: these ranks use all of its devices."""
    each = plan.world // plan.pp
    for group in sorted(set(plan.placement)):
        if group >= len(cluster.groups):
            yield Violation(
                "no such group", f"placement names group {group}, the cluster has groups 0 to {len(cluster.groups) - 1}"
            )
            continue
        devices, ranks = cluster.groups[group].nodes * cluster.groups[group].devices, plan.placement.count(group)
        if ranks * each != devices:
            yield Violation(
                "ranks do not fill a group",
                f"{ranks} pipeline ranks of {each} devices on group {group} = {ranks * each} but it has {devices} "
                "devices",
            )


def tensor_parallel_violations(
    plan: Plan, divisible: Mapping[str, int], tensor_parallel: bool = True, vocabulary: int = 0
) -> Iterator[Violation]:
    """Checks the degree of tensor parallelism. tp must divide heads and the feed-forward width. Key-value heads must
    divide tp or be divisible by it. A sharded `vocabulary` may be uneven, but every rank must have a part of it."""
    if plan.tp == 1:
        return
    if not tensor_parallel:
        yield Violation(
            "the model has no tensor-parallel form", f"tp({plan.tp}): no rule shards the layers of this model; use tp 1"
        )
        return
    for what, size in divisible.items():
        if size % plan.tp and not (what == "kv_heads" and plan.tp % size == 0):
            yield Violation(f"tp does not divide {what}", f"tp({plan.tp}) does not divide {what}({size})")
    if 0 < vocabulary <= -(-vocabulary // plan.tp) * (plan.tp - 1):
        yield Violation(
            "a tensor rank has none of the vocabulary",
            f"tp({plan.tp}) leaves the last tensor rank none of the vocabulary({vocabulary}): use a smaller tp",
        )


def expert_parallel_violations(plan: Plan, experts: int) -> Iterator[Violation]:
    """Checks that ep divides the number of experts. A dense model has none."""
    if plan.ep > 1 and not experts:
        yield Violation("the model has no experts", f"ep({plan.ep}): the model has no experts; use ep 1")
    elif plan.ep > 1 and experts % plan.ep:
        yield Violation("ep does not divide the experts", f"ep({plan.ep}) does not divide experts({experts})")


def context_parallel_violations(plan: Plan, divisible: Mapping[str, int]) -> Iterator[Violation]:
    """Checks Ulysses: each context rank gets whole heads of its tensor rank. Too few key-value heads are replicated."""
    heads, ranks = divisible.get("heads", 0), plan.ulysses_ranks * plan.tp
    if plan.context == ContextParallelMethod.ulysses and heads % ranks:
        yield Violation(
            "ulysses does not divide heads",
            f"ulysses({plan.ulysses_ranks}) * tp({plan.tp}) = {ranks} does not divide heads({heads})",
        )


def offload_violations(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """Checks that the cluster has a link to the host, or to a disk, for what is offloaded."""
    for what in plan.offload:
        if what in DISK_OFFLOADS and not cluster.storage_bandwidth:
            yield Violation(
                "no disk",
                f"off-{what}: the cluster names no storage_bandwidth of its nodes; `meshwright probe --save` measures "
                "this machine's",
            )
        elif what not in DISK_OFFLOADS and not cluster.host_bandwidth:
            yield Violation(
                "no link to the host",
                f"off-{what}: the cluster names no host_bandwidth between its devices and their hosts (a core's "
                "memory is the host's); "
                "off-optimizer-disk needs none",
            )


def stage_violations(plan: Plan, blocks: int, against: str = "") -> Iterator[Violation]:
    """Checks that every stage has a block, and that a manual stage split covers all blocks. `against` is the reason
    why the model cannot be cut between its blocks; empty if it can."""
    if plan.stages > 1 and against:
        yield Violation(
            "the model cannot be cut between its blocks",
            f"pp({plan.pp}): {against}, and stages are left and entered between blocks: use pp1",
        )
    if plan.layers_per_stage and sum(plan.layers_per_stage) != blocks:
        total = sum(plan.layers_per_stage)
        yield Violation(
            "stages miss blocks",
            f"layers_per_stage {list(plan.layers_per_stage)} sums to {total}, the model has {blocks} blocks",
        )
    elif plan.stages > 1 and blocks < plan.stages:
        yield Violation(
            "more stages than blocks",
            f"pp({plan.pp}) * virtual({plan.virtual_stages}) = {plan.stages} stages need as many blocks, the model "
            f"has {blocks}",
        )


def block_count_violations(plan: Plan, blocks: int) -> Iterator[Violation]:
    """Checks that the number of blocks that recompute or offload activations is at most the number of blocks of the
    stage."""
    if not (plan.recompute_layers or plan.offload_layers) or any(stage_violations(plan, blocks)):
        return
    most = max(plan.stage_layers(max(blocks, 1)))
    sent = next((what for what in plan.offload if what in ACTIVATION_OFFLOADS), "")
    for what, count in ((f"rc-{plan.recompute}", plan.recompute_layers), (f"off-{sent}", plan.offload_layers)):
        named = f"{what}{count}"
        if count > most:
            yield Violation(
                "more blocks are counted than a stage has",
                f"{named} counts blocks of a stage, which has {most} at most: write {what} for all of them",
            )


def batch_violations(plan: Plan, batch: int) -> Iterator[Violation]:
    """Yields a violation if the batch is not a whole number of micro-batches on every replica, or if the schedule
    does not support that number."""
    rows, each = plan.rows_per_round, round_equation(plan).partition(" = ")[0]
    if plan.shares and plan.uneven_batch != batch:
        yield Violation("shares are of another batch", f"shares: {shares_equation(plan)} but the batch is {batch}")
        return
    if plan.shares:
        return
    if batch % rows:
        yield Violation("batch does not divide", f"batch {batch} is not a multiple of {round_equation(plan)}")
        return
    rules, count = plan.schedule_rules, batch // rows
    if count % (multiple := rules.multiple_of(plan.pp)):
        named = f"pp({multiple})" if rules.in_rounds else multiple
        yield Violation(
            "interleaving does not divide",
            f"{rules.name}: {count} micro-batches are not a multiple of {named}; "
            f"a batch of {rows * multiple} sequences or a multiple of it would be",
        )
    elif count < (least := rules.min_micro_batches(plan.pp)):
        yield Violation(
            "schedule needs more micro-batches",
            f"{rules.name}: {count} micro-batches are fewer than the {least} that pp({plan.pp}) needs; "
            f"{DEFAULT_SCHEDULE} takes any number",
        )
    elif not rules.accepts(plan.pp, count):
        yield Violation(
            "the actions order another batch",
            f"its actions order {rules.ordered_micro_batches} micro-batches, batch {batch} / ({each}) is {count}",
        )


def batch_split_violations(plan: Plan, batch: int, against: str) -> Iterator[Violation]:
    """Checks that a batch whose rows depend on each other is not divided. `against` is the reason for the
    dependence; empty if rows are independent."""
    if against and (plan.dp > 1 or plan.micro_batch < batch):
        yield Violation("rows of a batch see each other", f"a batch must not be divided: {against}; use dp1.mb{batch}")


def exact_sum_violations(plan: Plan, exact: int) -> Iterator[Violation]:
    """Checks that exact sums use micro-batches of one size, the one that the workload names."""
    if exact and plan.micro_batch_sizes:
        yield Violation(
            "exact sums are of micro-batches of one size",
            f"micro-batch sizes {list(plan.micro_batch_sizes)} are not workload.exact({exact}); use mb{exact}",
        )
    elif exact and plan.micro_batch != exact:
        yield Violation(
            "exact sums are of other micro-batches",
            f"micro_batch({plan.micro_batch}) is not workload.exact({exact}); use mb{exact}",
        )


def diloco_violations(plan: Plan, local: DilocoConfig | None) -> Iterator[Violation]:
    """Checks that the DiLoCo replicas are the state replicas of the plan."""
    if local is None:
        return
    if plan.dp_replicate != local.replicas:
        yield Violation(
            "replicas are of another number",
            f"dp_replicate({plan.dp_replicate}) is not workload.local.replicas({local.replicas}); use "
            f"dp{local.replicas}, or dp{local.replicas}xN.z1",
        )
    other = [
        name
        for name, there in (
            ("ep", plan.ep > 1),
            ("ga", plan.shares),
            ("mb of unlike sizes", plan.micro_batch_sizes),
            *((f"off-{what}", True) for what in offloaded_state_names(plan)),
            ("z0 with cp", plan.cp > 1 and not plan.zero),
        )
        if there
    ]
    if other:
        yield Violation(
            "replicas of their own do not go with it",
            f"workload.local does not go with {', '.join(other)}; leave it out",
        )


def offloaded_state_names(plan: Plan) -> tuple[str, ...]:
    """Returns the offloaded kinds of state that an optimizer update reads and writes.

    >>> from meshwright.spec.plan import parse_plan
    >>> offloaded_state_names(parse_plan("dp2.z1.off-optimizer-disk.off-activations"))
    ('optimizer-disk',)
    """
    return tuple(str(what) for what in plan.offload if what not in ACTIVATION_OFFLOADS)


class UpdateProperties(NamedTuple):
    """The properties of the optimizer update: the precision recipe, whether some or all tensors are updated as a
    whole, and which expert tensors are. `on_cores` means that the devices are CPU cores, whose memory is the
    host's."""

    recipe: Recipe
    whole: bool = False
    on_cores: bool = True
    experts: tuple[str, ...] = ()

    @property
    def there(self) -> bool:
        """Whether offloaded weights are updated on the host. This is the case on an accelerator without main
        weights: the weights themselves are updated, and the device cannot reach them while they are offloaded."""
        return not (self.on_cores or self.recipe.master)

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, layers: Sequence[LayerSpec] = ()) -> UpdateProperties:
        """Returns the properties for a workload, a cluster and, where known, the layers of the model."""
        rule = workload.optimizer
        on_cores = all(group.device.name.lower().startswith("cpu") for group in cluster.groups)
        values = [(layer, each) for layer in layers for each in layer.parameters if each.experts and not each.frozen]
        experts = tuple(f"{layer.name}.{each.name}" for layer, each in values if rule.updates_whole(each.shape, True))
        return cls(workload.recipe, rule.whole, on_cores, experts)


def update_violations(plan: Plan, update: UpdateProperties) -> Iterator[Violation]:
    """Checks the update against precision types and against rules that update whole tensors."""
    recipe, offloaded = update.recipe, offloaded_state_names(plan)
    if recipe.products == "fp8" and (plan.tp > 1 or any(plan.splits_backward(stage) for stage in range(plan.stages))):
        yield Violation(
            "float8 layers multiply whole weights in one action",
            "fp8 runs without tensor parallelism and zero-bubble schedules: use tp1 and 1f1b, or bf16",
        )
    if recipe.compression is not None and plan.shard_weights:
        yield Violation(
            "compressed gradients go in equal parts",
            "compressed gradients go in equal parts: leave shards out, or compression",
        )
    if update.there and offloads_weights(plan.offload) and not offloads_states(plan.offload):
        yield Violation(
            "weights that wait on the host are updated there",
            f"in {recipe.name} what is updated is the weights themselves, which wait on the host: add off-optimizer, "
            "so that they are updated there, or use bf16",
        )
    elif update.there and offloads_weights(plan.offload) and plan.offload_share < plan.weights_share:
        yield Violation(
            "weights that wait on the host are updated there",
            f"in {recipe.name} what is updated is the weights themselves: of the states at least the share of the "
            "weights must wait on the host "
            f"({plan.weights_share}, not {plan.offload_share}), so that those which wait are updated there; or use "
            "bf16",
        )
    if offloaded and (update.whole or recipe.rounds or recipe.eight):
        what = (
            "an optimizer of whole tensors"
            if update.whole
            else f"precision {recipe.name}"
            if recipe.rounds
            else "states of 8 bits"
        )
        yield Violation(
            "such states cannot wait elsewhere",
            f"{what} cannot wait elsewhere: leave off-{offloaded[0]} out, or use AdamW with bf16",
        )
    if plan.ep > 1 and update.experts:
        yield Violation(
            "experts that are dealt are nowhere whole",
            f"the optimizer needs {update.experts[0]} whole, of which ep deals the experts to ranks: use ep1, or AdamW",
        )


def workload_violations(
    plan: Plan, workload: Workload, cluster: Cluster, layers: Sequence[LayerSpec] = ()
) -> Iterator[Violation]:
    """Checks every rule of a workload except those of its batch. `layers` are those of the model, if they are known."""
    yield from update_violations(plan, UpdateProperties.of(workload, cluster, layers))
    yield from exact_sum_violations(plan, workload.exact)
    yield from diloco_violations(plan, workload.local)


def check_batch_size(plan: Plan) -> int:
    """Returns the number of rows for a comparison with one device: two micro-batches of every replica and stage, or
    as many as the plan's schedule orders."""
    return plan.uneven_batch or plan.rows_per_round * (plan.schedule_rules.ordered_micro_batches or 2 * plan.pp)


def half_sequence_length(plan: Plan, length: int) -> int:
    """Returns half of a row's `length` tokens, rounded down to what the plan can divide; 0 if that is less than 8.

    >>> from meshwright.spec.plan import parse_plan
    >>> half_sequence_length(parse_plan("tp4.sp"), 46), half_sequence_length(parse_plan("dp2"), 12)
    (20, 0)
    """
    divisor = math.lcm(plan.tp if plan.sequence_parallel else 1, 2 * plan.cp * plan.ulysses_ranks if plan.cp > 1 else 1)
    divisor = divisor * plan.tp if plan.sequence_parallel and plan.cp > 1 else divisor
    half = length // 2 // divisor * divisor
    return half if half >= max(8, divisor) else 0


def sequence_violations(plan: Plan, sequence: int, context: int = 0, against: str = "") -> Iterator[Violation]:
    """Checks the sequence length. Sequence parallelism cuts it into tp pieces, context parallelism into 2 x cp. Learned
    positions limit the length.

    `against` is the reason why the model's layers cannot work on a piece of the sequence; empty if they can.
    """
    if plan.sequence_parallel and against:
        yield Violation("sequence parallelism would be wrong", f"sp: {against}; leave sequence parallelism out")
    if plan.sequence_parallel and plan.cp == 1 and sequence % plan.tp:
        yield Violation("tp does not divide the sequence", f"sp: tp({plan.tp}) does not divide sequence({sequence})")
    if plan.sequence_parallel and plan.cp > 1 and sequence % (plan.tp * plan.cp):
        product = plan.tp * plan.cp
        yield Violation(
            "tp does not divide the sequence",
            f"sp: tp({plan.tp}) * cp({plan.cp}) = {product} does not divide sequence({sequence})",
        )
    if plan.cp > 1 and sequence % (2 * plan.cp):
        yield Violation(
            "cp does not divide the sequence", f"2 * cp({plan.cp}) = {2 * plan.cp} does not divide sequence({sequence})"
        )
    if context and sequence > context:
        yield Violation(
            "the sequence is too long", f"sequence {sequence} is longer than the {context} positions that the model has"
        )


def plan_violations(job: Job, plan: Plan) -> Iterator[Violation]:
    """Yields every rule that `plan` breaks for `job`, the simplest first."""
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
    yield from batch_split_violations(plan, job.workload.batch, job.model.against_division)
    yield from batch_violations(plan, job.workload.batch)
    yield from workload_violations(plan, job.workload, job.cluster, job.model.layers)


def validate_plan(job: Job, plan: Plan) -> None:
    """Raises InputError with the first rule that `plan` breaks for `job`."""
    for fault in plan_violations(job, plan):
        raise InputError(f"plan {plan.name}: {fault.message}")


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
"""Supported values of the fields of a plan. Every field that is not listed supports all of its values."""


def unsupported_parts(plan: Plan) -> tuple[str, ...]:
    """Returns the parts of the plan's name that this version does not support yet; empty if it supports the plan."""
    said = {
        "schedule": str(plan.schedule),
        "offload": ".".join(offload_name_parts(plan)),
    }
    return tuple(said[name] for name, values in SUPPORTED_VALUES.items() if getattr(plan, name) not in values)


def is_supported(plan: Plan) -> bool:
    """Returns whether this version supports the plan."""
    return not unsupported_parts(plan)
