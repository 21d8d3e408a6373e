"""When a plan is legal for a model, a batch and a number of devices: pure rules, asked by the planner, by what reads a person's plan and by the
runtime before it starts a single rank.

A rule is a `Fault`: a short reason, the same for all plans that break it, and one line with the numbers. No fault: the plan can run.
Why so early: ranks with unlike sizes abort inside gloo without a Python error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.local import Local
from meshwright.spec.model import Layer
from meshwright.spec.plan import ACTIVATIONS, FILES, Context, Plan, Schedule, states_wait, weights_wait
from meshwright.spec.precision import Recipe
from meshwright.spec.workload import Workload


class Fault(NamedTuple):
    """Why a plan cannot run: `reason` groups plans, `message` is the line for this one."""

    reason: str
    message: str


def world_faults(plan: Plan, devices: int) -> Iterator[Fault]:
    """World size = pp x dp x cp x tp must be the number of devices; ep must divide dp_shard x cp x tp."""
    if plan.world != devices:
        factors = [(axis, getattr(plan, axis)) for axis in ("dp", "tp", "pp", "cp") if axis in ("dp", "tp", "pp") or plan.cp > 1]
        product = " * ".join(f"{axis}({degree})" for axis, degree in factors)
        yield Fault("degrees do not multiply to the devices", f"{product} = {plan.world} but the cluster has {devices} devices")
    inner = plan.dp_shard * plan.cp * plan.tp
    if inner % plan.ep:
        yield Fault(
            "ep does not divide", f"ep({plan.ep}) does not divide dp_shard({plan.dp_shard}) * cp({plan.cp}) * tp({plan.tp}) = {inner}"
        )


def placement_faults(plan: Plan, cluster: Cluster) -> Iterator[Fault]:
    """A group that holds pipeline ranks is taken whole: their devices are all of its devices."""
    each = plan.world // plan.pp
    for group in sorted(set(plan.placement)):
        if group >= len(cluster.groups):
            yield Fault("no such group", f"placement names group {group}, the cluster has groups 0 to {len(cluster.groups) - 1}")
            continue
        devices, ranks = cluster.groups[group].nodes * cluster.groups[group].devices, plan.placement.count(group)
        if ranks * each != devices:
            yield Fault(
                "ranks do not fill a group",
                f"{ranks} pipeline ranks of {each} devices on group {group} = {ranks * each} but it has {devices} devices",
            )


def tensor_faults(plan: Plan, divisible: Mapping[str, int], tensor_parallel: bool = True, vocabulary: int = 0) -> Iterator[Fault]:
    """tp must divide heads and the feed-forward width; key-value heads must divide it or be divided by it; a `vocabulary` that is shared may be uneven, but
    every rank must have some of it."""
    if plan.tp == 1:
        return
    if not tensor_parallel:
        yield Fault("the model has no tensor-parallel form", f"tp({plan.tp}): no rule shards the layers of this model; use tp 1")
        return
    for what, size in divisible.items():
        if size % plan.tp and not (what == "kv_heads" and plan.tp % size == 0):
            yield Fault(f"tp does not divide {what}", f"tp({plan.tp}) does not divide {what}({size})")
    if 0 < vocabulary <= -(-vocabulary // plan.tp) * (plan.tp - 1):
        yield Fault(
            "a tensor rank has none of the vocabulary",
            f"tp({plan.tp}) leaves the last tensor rank none of the vocabulary({vocabulary}): use a smaller tp",
        )


def expert_faults(plan: Plan, experts: int) -> Iterator[Fault]:
    """ep must divide the experts, of which a dense model has none."""
    if plan.ep > 1 and not experts:
        yield Fault("the model has no experts", f"ep({plan.ep}): the model has no experts; use ep 1")
    elif plan.ep > 1 and experts % plan.ep:
        yield Fault("ep does not divide the experts", f"ep({plan.ep}) does not divide experts({experts})")


def context_faults(plan: Plan, divisible: Mapping[str, int]) -> Iterator[Fault]:
    """Ulysses gives each context rank whole heads of its tensor rank; key-value heads that are too few are repeated."""
    heads, ranks = divisible.get("heads", 0), plan.head_ranks * plan.tp
    if plan.context == Context.ulysses and heads % ranks:
        yield Fault("ulysses does not divide heads", f"ulysses({plan.head_ranks}) * tp({plan.tp}) = {ranks} does not divide heads({heads})")


def offload_faults(plan: Plan, cluster: Cluster) -> Iterator[Fault]:
    """What is offloaded needs a way to the host, or to a disk."""
    for what in plan.offload:
        if what in FILES and not cluster.storage_bandwidth:
            yield Fault(
                "no disk",
                f"off-{what}: the cluster names no storage_bandwidth of its nodes; `meshwright probe --save` measures this machine's",
            )
        elif what not in FILES and not cluster.host_bandwidth:
            yield Fault(
                "no link to the host",
                f"off-{what}: the cluster names no host_bandwidth between its devices and their hosts (a core's memory is the host's); "
                "off-optimizer-disk needs none",
            )


def stage_faults(plan: Plan, blocks: int, against: str = "") -> Iterator[Fault]:
    """Every stage needs a block; a stage split by hand must name them all. `against` is why the model cannot be cut between its blocks, where it cannot."""
    if plan.stages > 1 and against:
        yield Fault(
            "the model cannot be cut between its blocks",
            f"pp({plan.pp}): {against}, and stages are left and entered between blocks: use pp1",
        )
    if plan.layers_per_stage and sum(plan.layers_per_stage) != blocks:
        total = sum(plan.layers_per_stage)
        yield Fault("stages miss blocks", f"layers_per_stage {list(plan.layers_per_stage)} sums to {total}, the model has {blocks} blocks")
    elif plan.stages > 1 and blocks < plan.stages:
        yield Fault(
            "more stages than blocks",
            f"pp({plan.pp}) * virtual({plan.virtual_stages}) = {plan.stages} stages need as many blocks, the model has {blocks}",
        )


def count_faults(plan: Plan, blocks: int) -> Iterator[Fault]:
    """Blocks of a stage that recompute, or whose activations wait, are at most those that it has."""
    if not (plan.recompute_layers or plan.offload_layers) or any(stage_faults(plan, blocks)):
        return
    most = max(plan.stage_layers(max(blocks, 1)))
    sent = next((what for what in plan.offload if what in ACTIVATIONS), "")
    for what, count in ((f"rc-{plan.recompute}", plan.recompute_layers), (f"off-{sent}", plan.offload_layers)):
        named = f"{what}{count}"
        if count > most:
            yield Fault(
                "more blocks are counted than a stage has",
                f"{named} counts blocks of a stage, which has {most} at most: write {what} for all of them",
            )


def batch_faults(plan: Plan, batch: int) -> Iterator[Fault]:
    """The batch is a whole number of micro-batches on every replica; interleaving turns in rounds of pp of them, dualpipev needs 2 pp, and a
    schedule of actions orders just so many."""
    slice_of_all, each = plan.rows_at_once, plan.round_equation.partition(" = ")[0]
    if plan.shares and plan.rows_shared_out != batch:
        yield Fault("shares are of another batch", f"shares: {plan.shares_equation} but the batch is {batch}")
    elif plan.shares:
        return
    elif batch % slice_of_all:
        yield Fault("batch does not divide", f"batch {batch} is not a multiple of {plan.round_equation}")
    elif plan.schedule == Schedule.interleaved and batch // slice_of_all % plan.pp:
        yield Fault(
            "interleaving does not divide",
            f"interleaved: {batch // slice_of_all} micro-batches are not a multiple of pp({plan.pp}); "
            f"a batch of {slice_of_all * plan.pp} sequences or a multiple of it would be",
        )
    elif plan.schedule == Schedule.dualpipev and batch // slice_of_all < 2 * plan.pp:
        yield Fault(
            "dualpipev has too few micro-batches",
            f"dualpipev: {batch // slice_of_all} micro-batches are fewer than 2 * pp({plan.pp}) = {2 * plan.pp}; zbv takes any number",
        )
    elif plan.schedule == Schedule.actions and batch // slice_of_all != (ordered := micro_batches_of(plan.actions)):
        yield Fault(
            "the actions order another batch",
            f"its actions order {ordered} micro-batches, batch {batch} / ({each}) is {batch // slice_of_all}",
        )


def division_faults(plan: Plan, batch: int, against: str) -> Iterator[Fault]:
    """Rows of a batch that see each other pass together. `against` is why they do, empty where they do not."""
    if against and (plan.dp > 1 or plan.micro_batch < batch):
        yield Fault("rows of a batch see each other", f"a batch must not be divided: {against}; use dp1.mb{batch}")


def exact_faults(plan: Plan, exact: int) -> Iterator[Fault]:
    """Exact sums are of micro-batches of one size, which the workload names."""
    if exact and plan.micro_batch_sizes:
        yield Fault(
            "exact sums are of micro-batches of one size",
            f"micro-batch sizes {list(plan.micro_batch_sizes)} are not workload.exact({exact}); use mb{exact}",
        )
    elif exact and plan.micro_batch != exact:
        yield Fault(
            "exact sums are of other micro-batches", f"micro_batch({plan.micro_batch}) is not workload.exact({exact}); use mb{exact}"
        )


def local_faults(plan: Plan, local: Local | None) -> Iterator[Fault]:
    """Replicas that update by themselves are the copies of the states that the plan holds."""
    if local is None:
        return
    if plan.dp_replicate != local.replicas:
        yield Fault(
            "replicas are of another number",
            f"dp_replicate({plan.dp_replicate}) is not workload.local.replicas({local.replicas}); use dp{local.replicas}, or dp{local.replicas}xN.z1",
        )
    other = [
        name
        for name, there in (
            ("ep", plan.ep > 1),
            ("ga", plan.shares),
            ("mb of unlike sizes", plan.micro_batch_sizes),
            *((f"off-{what}", True) for what in states_away(plan)),
            ("z0 with cp", plan.cp > 1 and not plan.zero),
        )
        if there
    ]
    if other:
        yield Fault("replicas of their own do not go with it", f"workload.local does not go with {', '.join(other)}; leave it out")


def states_away(plan: Plan) -> tuple[str, ...]:
    """What waits elsewhere of that which an update reads and writes.

    >>> from meshwright.spec.plan import parse_plan
    >>> states_away(parse_plan("dp2.z1.off-optimizer-disk.off-activations"))
    ('optimizer-disk',)
    """
    return tuple(str(what) for what in plan.offload if what not in ACTIVATIONS)


class Update(NamedTuple):
    """How weights are updated: types, whether some or all tensors are updated whole, whether devices are cores, whose memory is the host's, and
    tensors of experts that are updated whole."""

    recipe: Recipe
    whole: bool = False
    on_cores: bool = True
    experts: tuple[str, ...] = ()

    @property
    def there(self) -> bool:
        """Whether weights that wait elsewhere are updated there: it is they that are updated, and where they wait the device does not reach them."""
        return not (self.on_cores or self.recipe.master)

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, layers: Sequence[Layer] = ()) -> Update:
        rule = workload.optimizer
        on_cores = all(group.device.name.lower().startswith("cpu") for group in cluster.groups)
        held = [(layer, each) for layer in layers for each in layer.parameters if each.experts and not each.frozen]
        experts = tuple(f"{layer.name}.{each.name}" for layer, each in held if rule.updates_whole(each.shape, True))
        return cls(workload.recipe, rule.whole, on_cores, experts)


def update_faults(plan: Plan, update: Update) -> Iterator[Fault]:
    """What types, and rules that update tensors whole, go with."""
    recipe, away = update.recipe, states_away(plan)
    if recipe.products == "fp8" and (plan.tp > 1 or any(plan.separates(stage) for stage in range(plan.stages))):
        yield Fault(
            "float8 layers multiply whole weights in one action",
            "fp8 runs without tensor parallelism and zero-bubble schedules: use tp1 and 1f1b, or bf16",
        )
    if recipe.compression is not None and plan.shard_weights:
        yield Fault("compressed gradients go in equal parts", "compressed gradients go in equal parts: leave shards out, or compression")
    if update.there and weights_wait(plan.offload) and not states_wait(plan.offload):
        yield Fault(
            "weights that wait on the host are updated there",
            f"in {recipe.name} what is updated is the weights themselves, which wait on the host: add off-optimizer, "
            "so that they are updated there, or use bf16",
        )
    elif update.there and weights_wait(plan.offload) and plan.offload_share < plan.weights_share:
        yield Fault(
            "weights that wait on the host are updated there",
            f"in {recipe.name} what is updated is the weights themselves: of the states at least the share of the weights must wait on the host "
            f"({plan.weights_share}, not {plan.offload_share}), so that those which wait are updated there; or use bf16",
        )
    if away and (update.whole or recipe.rounds or recipe.eight):
        what = "an optimizer of whole tensors" if update.whole else f"precision {recipe.name}" if recipe.rounds else "states of 8 bits"
        yield Fault("such states cannot wait elsewhere", f"{what} cannot wait elsewhere: leave off-{away[0]} out, or use AdamW with bf16")
    if plan.ep > 1 and update.experts:
        yield Fault(
            "experts that are dealt are nowhere whole",
            f"the optimizer needs {update.experts[0]} whole, of which ep deals the experts to ranks: use ep1, or AdamW",
        )


def workload_faults(plan: Plan, workload: Workload, cluster: Cluster, layers: Sequence[Layer] = ()) -> Iterator[Fault]:
    """Every rule of what a workload asks for besides its batch. `layers` of the model, where they are known."""
    yield from update_faults(plan, Update.of(workload, cluster, layers))
    yield from exact_faults(plan, workload.exact)
    yield from local_faults(plan, workload.local)


def micro_batches_of(actions: Sequence[str]) -> int:
    """How many micro-batches the actions of a plan order.

    >>> micro_batches_of(("0F0 0F1 0B0 0B1",))
    2
    """
    return 1 + max((int(re.sub(r".*[FBW]", "", action)) for line in actions for action in line.split()), default=-1)


def proof_rows(plan: Plan) -> int:
    """Rows with which a plan is compared with one device: two micro-batches of every replica and stage, or as many as the plan's actions order."""
    return plan.rows_shared_out or plan.rows_at_once * (micro_batches_of(plan.actions) or 2 * plan.pp)


def half_length(plan: Plan, length: int) -> int:
    """Half of a row's `length` tokens, as far as the plan can divide them; 0 where that is less than 8.

    >>> from meshwright.spec.plan import parse_plan
    >>> half_length(parse_plan("tp4.sp"), 46), half_length(parse_plan("dp2"), 12)
    (20, 0)
    """
    divisor = math.lcm(plan.tp if plan.sequence_parallel else 1, 2 * plan.cp * plan.head_ranks if plan.cp > 1 else 1)
    divisor = divisor * plan.tp if plan.sequence_parallel and plan.cp > 1 else divisor
    half = length // 2 // divisor * divisor
    return half if half >= max(8, divisor) else 0


def sequence_faults(plan: Plan, sequence: int, context: int = 0, against: str = "") -> Iterator[Fault]:
    """Sequence parallelism cuts a sequence into tp pieces, context parallelism into 2 x cp; learned positions end somewhere.

    `against` is why the model's layers cannot work on a piece of the sequence, where they cannot.
    """
    if plan.sequence_parallel and against:
        yield Fault("sequence parallelism would be wrong", f"sp: {against}; leave sequence parallelism out")
    if plan.sequence_parallel and plan.cp == 1 and sequence % plan.tp:
        yield Fault("tp does not divide the sequence", f"sp: tp({plan.tp}) does not divide sequence({sequence})")
    if plan.sequence_parallel and plan.cp > 1 and sequence % (plan.tp * plan.cp):
        product = plan.tp * plan.cp
        yield Fault(
            "tp does not divide the sequence", f"sp: tp({plan.tp}) * cp({plan.cp}) = {product} does not divide sequence({sequence})"
        )
    if plan.cp > 1 and sequence % (2 * plan.cp):
        yield Fault("cp does not divide the sequence", f"2 * cp({plan.cp}) = {2 * plan.cp} does not divide sequence({sequence})")
    if context and sequence > context:
        yield Fault("the sequence is too long", f"sequence {sequence} is longer than the {context} positions that the model has")


def faults(job: Job, plan: Plan) -> Iterator[Fault]:
    """Every rule that `plan` breaks for `job`, the plainest first."""
    yield from placement_faults(plan, job.cluster) if plan.placement else world_faults(plan, job.cluster.devices)
    yield from tensor_faults(plan, job.model.divisible, job.model.tensor_parallel, job.model.shared_vocabulary)
    yield from expert_faults(plan, job.model.experts)
    yield from context_faults(plan, job.model.divisible)
    yield from offload_faults(plan, job.cluster)
    yield from stage_faults(plan, job.model.blocks, job.model.against_stages)
    yield from count_faults(plan, job.model.blocks)
    yield from sequence_faults(plan, job.workload.sequence, against=job.model.against_sequence)
    yield from division_faults(plan, job.workload.batch, job.model.against_division)
    yield from batch_faults(plan, job.workload.batch)
    yield from workload_faults(plan, job.workload, job.cluster, job.model.layers)


def check_plan(job: Job, plan: Plan) -> None:
    """Nothing, or InputError with the first rule that `plan` breaks for `job`."""
    for fault in faults(job, plan):
        raise InputError(f"plan {plan.name}: {fault.message}")
