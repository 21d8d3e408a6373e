"""Defines the plan of a job: all settings that must not change the result. `plan_name` formats the short name of a
plan, such as `dp8.tp2.pp4.z1`.

The world size is pp x dp_replicate x dp_shard x cp x tp. By default pp is the outermost axis and tp the innermost axis;
`axes` can change this order. The axis cp is inside dp.

[Note: batches] Replica r runs n_r micro-batches of m_r sequences. Its rows of the batch follow those of replica r - 1.
The sum of n_r * m_r over the replicas is the batch. The numbers n_r (`shares`) differ between replicas if devices
differ in speed. The sizes m_r (`micro_batch_sizes`) differ if equal sizes would not fit on all devices or would waste
memory. The loss is the sum over all labels divided by the number of labels, so neither n_r nor m_r changes the loss.
If all n_r are equal, replicas can synchronize in every micro-batch, which ZeRO 2 and 3 need, even if the m_r differ.
Replicas with unequal n_r synchronize once per step.

[Note: first blocks] A plan can limit recompute and activation offload to the first blocks of each virtual stage. If it
limits both, it limits them to the same number of blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_validator

from meshwright.core.codec import StrictModel, validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.enums import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_SCHEDULE,
    MESH_AXES,
    ContextParallelMethod,
    MeshAxis,
    Offload,
    Recompute,
    ScheduleName,
    upgrade_offload_fields,
)
from meshwright.spec.plan_checks import PLAN_CHECKS
from meshwright.spec.plan_name import expand_plan_words, parse_plan_name, plan_name
from meshwright.spec.schedules.schedule import Schedule, find_schedule, stage_to_rank


class Plan(StrictModel):
    """The distribution of a job over ranks. `version` is the version of the schema.

    The fields are those of a plan file. A plan validates itself: an invalid plan raises `InputError` on construction.
    """

    version: int = Field(default=1, ge=1, le=1, description="version of the schema")
    dp_replicate: int = Field(
        default=1, ge=1, description="shard groups that are replicas of each other; without ZeRO: replicas"
    )
    dp_shard: int = Field(
        default=1, ge=1, description="data-parallel ranks of a shard group, which ZeRO divides the states among"
    )
    tp: int = Field(default=1, ge=1, description="tensor-parallel ranks")
    sequence_parallel: bool = Field(
        default=False, description="whether tensor-parallel ranks also shard the activations between their layers"
    )
    pp: int = Field(default=1, ge=1, description="pipeline ranks")
    cp: int = Field(default=1, ge=1, description="context-parallel ranks, which divide each sequence")
    ep: int = Field(default=1, ge=1, description="expert-parallel ranks, which divide the experts")
    zero: int = Field(
        default=0, ge=0, le=3, description="ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights"
    )
    micro_batch: int = Field(
        default=1, ge=1, description="sequences per micro-batch of a replica; the maximum if replicas differ"
    )
    micro_batch_sizes: tuple[int, ...] = Field(
        default=(), description="sequences per micro-batch of each data replica; empty: micro_batch for all"
    )
    shares: tuple[int, ...] = Field(
        default=(), description="micro-batches per step of each data replica; empty: equal numbers"
    )
    recompute: Recompute = Field(default=Recompute.none, description="operations of blocks that backward recomputes")
    recompute_layers: int = Field(
        default=0, ge=0, description="number of blocks at the start of each virtual stage that recompute; 0: all"
    )
    recompute_rest: Recompute = Field(
        default=Recompute.none, description="recompute of the blocks after recompute_layers: none or sac"
    )
    offload: tuple[Offload, ...] = Field(
        default=(), description="kinds of tensors that are offloaded to CPU memory or to disk"
    )
    offload_share: int = Field(
        default=100, ge=1, le=100, description="percent of each rank's optimizer states that are offloaded"
    )
    weights_share: int = Field(
        default=100, ge=1, le=100, description="percent of each rank's weights that are offloaded"
    )
    offload_layers: int = Field(
        default=0,
        ge=0,
        description="number of blocks at the start of each virtual stage whose activations are offloaded; 0: all",
    )
    schedule: ScheduleName = Field(default=DEFAULT_SCHEDULE, description="pipeline schedule")
    virtual_stages: int = Field(default=1, ge=1, description="stages per pipeline rank")
    actions: tuple[str, ...] = Field(
        default=(), description="actions of each pipeline rank in a custom schedule, such as '0F0 0F1 0B0 0B1'"
    )
    layers_per_stage: tuple[int, ...] = Field(
        default=(), description="number of blocks of each virtual stage; empty: as even as possible"
    )
    context: ContextParallelMethod = Field(
        default=ContextParallelMethod.ring,
        description="method by which context-parallel ranks exchange keys and values",
    )
    ulysses: int = Field(
        default=0,
        ge=0,
        description="context-parallel ranks per Ulysses group, with rings between groups; 0: all ranks in one group",
    )
    placement: tuple[int, ...] = Field(
        default=(),
        description=(
            "heterogeneous node groups: index of the node group of each pipeline rank; empty: all devices in order"
        ),
    )
    shard_weights: tuple[int, ...] = Field(
        default=(), description="relative shard sizes of states on the ranks of a shard group; empty: equal shards"
    )
    loss_chunks: int = Field(
        default=1,
        ge=1,
        description="number of chunks of a micro-batch's labels; the logits of each chunk are computed separately",
    )
    axes: tuple[MeshAxis, ...] = Field(
        default=MESH_AXES, description="mesh axes from outermost to innermost; dp includes cp"
    )
    compile: bool = Field(default=False, description="compile blocks with torch.compile")
    bucket: int = Field(default=DEFAULT_BUCKET_BYTES, ge=1, description="minimum bytes of gradients per collective")

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, given: Any) -> Any:
        return upgrade_offload_fields(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check(self) -> Plan:
        for check in PLAN_CHECKS:
            check(self)
        return self

    @property
    def dp(self) -> int:
        """Returns the number of replicas that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Returns the number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Returns the number of ranks that shard the states of one replica: the data ranks of the shard group with
        their context ranks. Returns 1 at ZeRO 0."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def state_replicas(self) -> int:
        """Returns the number of ranks with the same states. From ZeRO 1 on, this is the number of shard groups. At ZeRO
        0, it is the number of all data and context ranks.

        >>> Plan(dp_replicate=2, dp_shard=2, cp=2, zero=1).state_replicas, Plan(dp_replicate=2, cp=2).state_replicas
        (2, 4)
        """
        return self.dp * self.cp // self.shards

    @property
    def expert_tp(self) -> int:
        """Returns the number of tensor ranks that shard one expert.

        Expert parallelism uses the ranks of dp_shard x cp first. If these do not suffice, it also uses tensor ranks.
        The remaining factor of tp shards each expert ([Note: expert ranks] in runtime/expert_parallel/groups.py).

        >>> Plan(tp=2, ep=4, dp_shard=8, zero=1).expert_tp, Plan(tp=8, ep=8).expert_tp
        (2, 1)
        """
        return self.tp // (self.ep // math.gcd(self.ep, self.dp_shard * self.cp)) if self.ep > 1 else self.tp

    def micro_batch_of(self, replica: int) -> int:
        """Returns the number of sequences in a micro-batch of `replica`."""
        return self.micro_batch_sizes[replica] if self.micro_batch_sizes else self.micro_batch

    @property
    def rows_per_round(self) -> int:
        """Returns the number of sequences in one micro-batch of each replica, summed over the replicas."""
        return sum(self.micro_batch_sizes) or self.dp * self.micro_batch

    @property
    def uneven_batch(self) -> int:
        """Returns the batch in sequences that `shares` implies, or 0 without `shares`."""
        return sum(count * self.micro_batch_of(replica) for replica, count in enumerate(self.shares))

    def micro_batches(self, batch: int, replica: int | None = None) -> int:
        """Returns the number of micro-batches per step of `replica`. If `replica` is None, returns the largest number
        of any replica.

        Raises: InputError if the replicas cannot divide `batch`.
        """
        if self.shares:
            if self.uneven_batch != batch:
                raise InputError(
                    Message(
                        "shares: {shares_equation} but the batch is {batch}",
                        shares_equation=shares_equation(self),
                        batch=batch,
                    )
                )
            return max(self.shares) if replica is None else self.shares[replica]
        count, rest = divmod(batch, self.rows_per_round)
        if rest or not count:
            raise InputError(
                Message(
                    "batch {batch} is not a multiple of {round_equation}",
                    batch=batch,
                    round_equation=round_equation(self),
                )
            )
        return count

    @property
    def ulysses_ranks(self) -> int:
        """Returns the number of context ranks that exchange heads by Ulysses, or 1 without Ulysses. Each ring has cp /
        ulysses_ranks ranks."""
        return 1 if self.context == ContextParallelMethod.ring else self.ulysses or self.cp

    @property
    def stages(self) -> int:
        """Returns the number of virtual stages."""
        return self.pp * self.virtual_stages

    @property
    def schedule_rules(self) -> Schedule:
        """Returns the rules of the pipeline schedule."""
        return find_schedule(self.schedule, self.actions)

    def stage_to_rank(self, stage: int) -> int:
        """Returns the pipeline rank that runs a stage."""
        return stage_to_rank(stage, self.pp, self.schedule_rules.v_shape)

    def splits_backward(self, stage: int) -> bool:
        """Returns whether the backward of a stage is two actions: B for input gradients and W for weight gradients."""
        return self.schedule_rules.splits_stage(stage)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a pipeline rank, ascending."""
        return [stage for stage in range(self.stages) if self.stage_to_rank(stage) == rank]

    def stage_layers(self, blocks: int) -> tuple[int, ...]:
        """Returns the number of blocks of each virtual stage.

        Without `layers_per_stage` the numbers differ by at most 1, and the first stages have the larger number.

        Raises: InputError if `layers_per_stage` does not add up to `blocks`, or if there are fewer blocks than stages.
        """
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != blocks:
                raise InputError(
                    Message(
                        "layers_per_stage {list} sums to {total}, the model has {blocks} blocks",
                        list=list(self.layers_per_stage),
                        total=sum(self.layers_per_stage),
                        blocks=blocks,
                    )
                )
            return self.layers_per_stage
        if blocks < self.stages and self.stages > 1:
            raise InputError(
                Message(
                    "pp({pp}) * virtual({virtual_stages}) = {stages} stages need at least one block each, the model "
                    "has {blocks} blocks",
                    pp=self.pp,
                    virtual_stages=self.virtual_stages,
                    stages=self.stages,
                    blocks=blocks,
                )
            )
        each, rest = divmod(blocks, self.stages)
        return tuple(each + (stage < rest) for stage in range(self.stages))

    @property
    def name(self) -> str:
        """Returns the short name of the plan, as the function `plan_name` formats it."""
        return plan_name(self)

    @property
    def digest(self) -> str:
        """Returns a digest of all fields, by which checkpoints recognize the plan."""
        return hashlib.sha256(self.to_json(None).encode()).hexdigest()[:16]


def parse_plan(name: str, world: Callable[[], int] | None = None) -> Plan:
    """Returns the plan with the short name `name`. `world` returns the number of ranks, for names without a data
    degree such as fsdp; None: it is unknown.

    Raises: InputError with the part of the name that is not understood.

    >>> parse_plan("dp2x4.tp2.z3.rc-full").world
    16
    """
    return validate_data(Plan, parse_plan_name(expand_plan_words(name, world)), f"plan {name!r}")


MICRO_BATCHES_PER_STAGE = 4
"""The default number of micro-batches of a pipeline, per pipeline rank: its bubble is then under a fifth of a step."""


def default_micro_batches(plan: Plan, rows: int) -> list[int]:
    """Returns the micro-batch sizes of an open `plan` for a global batch of `rows` rows, the preferred and largest one
    first: all rows of a replica, or with pipeline ranks a part of them that the schedule allows. A replica's rows are
    rounded up. With `shares`, the batch determines the size.

    >>> default_micro_batches(parse_plan("dp4"), 64), default_micro_batches(parse_plan("dp2.pp4"), 64)
    ([16, 8, 4, 2, 1], [2, 1])
    >>> default_micro_batches(parse_plan("dp2.ga3-1"), 64)
    [16]
    """
    if plan.shares:
        return [max(rows // sum(plan.shares), 1)]
    own, rules = -(-rows // plan.dp), plan.schedule_rules
    counts = [count for count in range(1, own + 1) if own % count == 0 and rules.accepts(plan.pp, count)] or [own]
    usual = [count for count in counts if count <= MICRO_BATCHES_PER_STAGE * plan.pp] or counts[:1]
    first = usual[-1] if plan.pp > 1 else usual[0]
    return [own // count for count in counts if count >= first]


def with_default_micro_batch(plan: Plan, rows: int) -> Plan:
    """Returns `plan` with the preferred micro-batch size for a global batch of `rows` rows.

    >>> [with_default_micro_batch(parse_plan(name), 64).micro_batch for name in ("dp1", "dp4", "pp2", "dp2.pp4", "dp3")]
    [64, 16, 8, 2, 22]
    """
    return plan.but(micro_batch=default_micro_batches(plan, rows)[0])


def round_equation(plan: Plan) -> str:
    """Returns an equation with the value of `rows_per_round`. A batch must be a multiple of this value.

    >>> round_equation(parse_plan("dp2.mb4-2")), round_equation(parse_plan("dp2.mb4"))
    ('4+2 = 6', 'dp(2) * micro_batch(4) = 8')
    """
    sizes = "+".join(map(str, plan.micro_batch_sizes)) or f"dp({plan.dp}) * micro_batch({plan.micro_batch})"
    return f"{sizes} = {plan.rows_per_round}"


def shares_equation(plan: Plan) -> str:
    """Returns an equation for the batch that the `shares` of a plan imply."""
    if plan.micro_batch_sizes:
        parts = "+".join(f"{count}*{size}" for count, size in zip(plan.shares, plan.micro_batch_sizes, strict=True))
    else:
        parts = f"({'+'.join(map(str, plan.shares))}) * micro_batch({plan.micro_batch})"
    return f"{parts} = {plan.uneven_batch}"
