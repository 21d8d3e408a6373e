"""The answer: everything that must not change the result. A plan has a short name, `dp8.tp2.pp4.z1`, that reads back to
the same plan.

Name: parts joined by dots, each left out at its default. `dp8` is 8 replicas (ZeRO 0) or a shard group of 8 (ZeRO 1-3);
`dp2x4` is
2 replicas of shard groups of 4. `tpN`, `sp` (sequence parallelism of the tensor ranks), `ppN`, `cpN`, `epN`, `zN`,
`mbN` (sequences per
micro-batch; `mb8-2` of each data replica), the schedule (`gpipe`, `1f1b`, `interleaved2` with 2 virtual stages a rank,
`zbh1`, `zbv`, `dualpipev`; `csv-DIGEST` for one
that stands action by action in the plan's file), `ls10-11-11` (blocks of each virtual stage; `ls2x14-1`: 14 times 2,
then 1),
`rc-attn`, `rc-sac`, `rc-full`, `rc-full8` (the first 8 blocks of each virtual stage), `rc-full8+sac` (the others by
operation), `off-optimizer`, `off-optimizer-disk`, `off-activations8` (of the first 8 blocks of each virtual stage),
`off-activations-disk8`, `off-optimizer-disk60`
(of each rank's optimizer states 60 hundredths wait in files), `off-parameters-disk`, `off-parameters50` (half of its
weights; both have shares of their own), `ulysses` (how context ranks attend; else
by a ring; `ulysses2`: by rings over pairs that exchange heads), `place0-0-1` (which group of unlike nodes holds each
pipeline rank), `ga6-2` (micro-batches of each data replica in a step), `zw3-1` (parts of
the states that the ranks of a shard group hold), `order-dp-pp-tp` (another order of axes), `compile` (blocks go through
torch.compile).

World size = pp x dp_replicate x dp_shard x cp x tp, pp outermost, tp innermost unless `axes` says otherwise; cp lies
inside of dp.
"""

from __future__ import annotations

import hashlib
import re

from pydantic import Field, model_validator

from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    DEFAULT_BUCKET_BYTES,
    DISK_OFFLOADS,
    EXCLUSIVE_OFFLOADS,
    MESH_AXES,
    OFFLOAD_AMOUNT_FIELDS,
    OPTIMIZER_OFFLOADS,
    PARAMETER_OFFLOADS,
    PER_BLOCK_RECOMPUTE,
    STAGES_PER_RANK,
    ContextParallelMethod,
    MeshAxis,
    Offload,
    Recompute,
    ScheduleName,
    is_v_shape,
    offloads_activations,
    offloads_states,
    offloads_weights,
    stage_to_rank,
)
from meshwright.spec.layout import ShardWeight
from meshwright.spec.plan_fields import PlanMemoryPolicy
from meshwright.spec.plan_name import format_number_list, parse_number_list


class Plan(PlanMemoryPolicy):
    """How a job is laid over ranks: its degrees, and all else."""

    schedule: ScheduleName = ScheduleName.one_f_one_b
    virtual_stages: int = Field(default=1, ge=1, description="stages per pipeline rank")
    actions: tuple[str, ...] = Field(
        default=(), description="schedule actions: what each pipeline rank does, such as '0F0 0F1 0B0 0B1'"
    )
    layers_per_stage: tuple[int, ...] = Field(
        default=(), description="blocks of each virtual stage; empty: as even as can be"
    )
    context: ContextParallelMethod = Field(
        default=ContextParallelMethod.ring, description="how context ranks exchange keys and values"
    )
    ulysses: int = Field(
        default=0, ge=0, description="context ranks that exchange heads, with rings over the others; 0: all of them"
    )
    placement: tuple[int, ...] = Field(
        default=(),
        description="of unlike groups of nodes: the group that holds each pipeline rank; empty: all devices, in their order",
    )
    shard_weights: tuple[int, ...] = Field(
        default=(), description="parts of the states that each rank of a shard group holds; empty: equal parts"
    )
    loss_chunks: int = Field(
        default=1, ge=1, description="parts of a micro-batch's labels whose logits are made by themselves"
    )
    axes: tuple[MeshAxis, ...] = Field(
        default=MESH_AXES, description="from the outermost to the innermost; cp lies inside of dp"
    )
    compile: bool = Field(default=False, description="blocks go through torch.compile")
    bucket: int = Field(
        default=DEFAULT_BUCKET_BYTES, ge=1, description="bytes of gradients that one collective carries at least"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.zero == 0 and self.dp_shard > 1:
            raise ValueError(f"ZeRO 0 shards nothing: write dp{self.dp} without a shard group, or z1 to z3")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence parallelism (sp) splits activations over tensor ranks and needs tp > 1")
        self._has_stages()
        if self.layers_per_stage and len(self.layers_per_stage) != self.stages:
            raise ValueError(
                f"layers_per_stage names {len(self.layers_per_stage)} stages, the plan has pp({self.pp}) * virtual({self.virtual_stages}) = {self.stages}"
            )
        if self.layers_per_stage and min(self.layers_per_stage) < 1:
            raise ValueError("every stage needs at least one block")
        if self.context == ContextParallelMethod.ulysses and self.cp == 1:
            raise ValueError("ulysses says how context ranks attend and needs cp > 1")
        if self.ulysses and (
            self.context == ContextParallelMethod.ring
            or self.ulysses < 2
            or self.cp % self.ulysses
            or self.ulysses == self.cp
        ):
            raise ValueError(
                f"ulysses{self.ulysses}: ranks that exchange heads are a part of cp({self.cp}), 2 or more that divide it"
            )
        if self.placement and (
            len(self.placement) != self.pp or self.schedule not in (ScheduleName.gpipe, ScheduleName.one_f_one_b)
        ):
            raise ValueError(
                f"placement names {len(self.placement)} ranks of pp({self.pp}); each has its group, in 1f1b or gpipe"
            )
        if sorted(self.axes) != sorted(MESH_AXES):
            raise ValueError(f"axes {list(self.axes)} must name each of {', '.join(MESH_AXES)} once")
        if self.placement and self.axes[0] != "pp":
            raise ValueError(
                f"placement gives a group's devices to whole pipeline ranks: axes {list(self.axes)} must begin with pp"
            )
        return self

    @model_validator(mode="after")
    def _shared_out(self) -> Plan:
        """[Note: shares] Replicas with unlike numbers of micro-batches meet once a step: what meets in each micro-batch
        would wait for ever."""
        if not self.shares:
            return self
        if len(self.shares) != self.dp or self.dp < 2 or min(self.shares) < 1:
            raise ValueError(
                f"shares {list(self.shares)} give each of dp({self.dp}) replicas at least one micro-batch, of two replicas or more"
            )
        if self.zero > 1 or self.ep > 1:
            raise ValueError(
                "shares: replicas of unlike numbers of micro-batches may meet once a step only: use z0 or z1, and ep1"
            )
        if self.schedule not in (ScheduleName.gpipe, ScheduleName.one_f_one_b, ScheduleName.zbh1, ScheduleName.zbv):
            raise ValueError(
                f"shares: {self.schedule} orders one number of micro-batches; gpipe, 1f1b, zbh1 and zbv order any"
            )
        return self

    @model_validator(mode="after")
    def _sharded_out(self) -> Plan:
        weights = self.shard_weights
        if weights and (len(weights) != self.shards or self.shards < 2 or min(weights) < 1):
            raise ValueError(
                f"shard weights {list(weights)} give each of the {self.shards} ranks of a shard group at least 1, of two ranks or more at z1 to z3"
            )
        if weights and self.ep > 1:
            raise ValueError("shard weights: experts on unlike ranks have shard groups of their own; use ep1")
        return self

    def _has_stages(self) -> None:
        """Each schedule has its number of stages a rank."""
        least = STAGES_PER_RANK.get(self.schedule, 2 if self.schedule == ScheduleName.interleaved else 1)
        free = self.schedule in (ScheduleName.interleaved, ScheduleName.actions)
        if self.virtual_stages < least or (self.virtual_stages > least and not free):
            needs = "2 or more" if self.schedule == ScheduleName.interleaved else least
            raise ValueError(f"schedule {self.schedule} with {self.virtual_stages} virtual stages: it needs {needs}")
        if self.virtual_stages > 1 and self.pp == 1:
            raise ValueError("virtual stages need pp > 1")
        if (self.schedule == ScheduleName.actions) != bool(self.actions) or (
            self.actions and len(self.actions) != self.pp
        ):
            raise ValueError(
                f"schedule {self.schedule} with the actions of {len(self.actions)} of pp({self.pp}) ranks: schedule actions lists all"
            )

    def strides(self) -> dict[str, int]:
        """How far apart the ranks of each axis are.

        >>> Plan(pp=4, dp_replicate=3, tp=2, axes=("dp", "pp", "tp")).strides()
        {'tp': 1, 'pp': 2, 'cp': 8, 'dp_shard': 8, 'dp_replicate': 8}
        """
        found, inside = {}, 1
        for axis in reversed(self.axes):
            for part in ("cp", "dp_shard", "dp_replicate") if axis == "dp" else (axis,):
                found[part] = inside
                inside *= getattr(self, part)
        return found

    @property
    def head_ranks(self) -> int:
        """Context ranks that exchange heads; a ring goes over cp divided by these."""
        return 1 if self.context == ContextParallelMethod.ring else self.ulysses or self.cp

    @property
    def stages(self) -> int:
        """Virtual stages in all."""
        return self.pp * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        return stage_to_rank(stage, self.pp, is_v_shape(self.schedule, self.actions))

    def separates(self, stage: int) -> bool:
        """Whether the backward of a stage is two actions, B and W."""
        if self.schedule == ScheduleName.actions:
            return any(re.search(rf"(^|\s){stage}W", line) for line in self.actions)
        return self.schedule in (ScheduleName.zbh1, ScheduleName.zbv, ScheduleName.dualpipev)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def shard_weight(self, replica: int | None = None) -> float:
        """The shard of `replica`, or the largest one, as so many equal shards; of its context ranks the largest.

        >>> parse_plan("dp2.z3.zw3-1").shard_weight(1), parse_plan("dp4.z3").shard_weight()
        (0.5, 1.0)
        """
        if not self.shard_weights:
            return 1.0
        first = 0 if replica is None else replica % self.dp_shard * self.cp
        held = self.shard_weights[first : None if replica is None else first + self.cp]
        return max(held) * self.shards / sum(self.shard_weights)

    def shard_heft(self, replica: int | None = None) -> ShardWeight | None:
        """Which shard that is, the first of those that weigh as much; None where all are equal.

        >>> parse_plan("dp2.z3.zw3-1").shard_heft(1)
        ShardWeight(before=3, past=4, total=4)
        """
        if not self.shard_weights:
            return None
        all_of, first = self.shard_weights, 0 if replica is None else replica % self.dp_shard * self.cp
        at = all_of.index(max(all_of[first : None if replica is None else first + self.cp]))
        return ShardWeight(sum(all_of[:at]), sum(all_of[: at + 1]), sum(all_of))

    def stage_layers(self, blocks: int) -> tuple[int, ...]:
        """Blocks of each virtual stage; without `layers_per_stage` as even as can be, the first stages taking the
        rest."""
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != blocks:
                raise InputError(
                    f"layers_per_stage {list(self.layers_per_stage)} sums to {sum(self.layers_per_stage)}, the model has {blocks} blocks"
                )
            return self.layers_per_stage
        if blocks < self.stages and self.stages > 1:
            raise InputError(
                f"pp({self.pp}) * virtual({self.virtual_stages}) = {self.stages} stages need as many blocks, the model has {blocks}"
            )
        each, rest = divmod(blocks, self.stages)
        return tuple(each + (stage < rest) for stage in range(self.stages))

    @property
    def name(self) -> str:
        return plan_name(self)

    @property
    def digest(self) -> str:
        """Of everything the plan says; checkpoints and records quote it."""
        return hashlib.sha256(self.to_json(None).encode()).hexdigest()[:16]


def plan_name(plan: Plan) -> str:
    """
    >>> plan_name(Plan(dp_shard=8, tp=2, pp=4, zero=1))
    'dp8.tp2.pp4.z1'
    """
    parts = []
    if plan.dp_replicate > 1 and plan.dp_shard > 1:
        parts.append(f"dp{plan.dp_replicate}x{plan.dp_shard}")
    elif plan.zero > 0 and plan.dp_replicate > 1:
        parts.append(f"dp{plan.dp_replicate}x1")
    elif plan.dp > 1 or plan.world == 1:
        parts.append(f"dp{plan.dp}")
    parts += [f"{axis}{degree}" for axis, degree in (("tp", plan.tp),) if degree > 1]
    parts += ["sp"] if plan.sequence_parallel else []
    parts += [
        f"{axis}{degree}"
        for axis, degree in (("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep), ("z", plan.zero))
        if degree > (axis != "z")
    ]
    parts += [f"mb{format_number_list(plan.micro_batch_sizes or (plan.micro_batch,))}"] if plan.micro_batch > 1 else []
    if plan.schedule == ScheduleName.interleaved:
        parts.append(f"interleaved{plan.virtual_stages}")
    elif plan.schedule == ScheduleName.actions:
        parts.append("csv-" + hashlib.sha256("\n".join(plan.actions).encode()).hexdigest()[:8])
    elif plan.schedule != ScheduleName.one_f_one_b:
        parts.append(str(plan.schedule))
    parts += ["ls" + format_number_list(plan.layers_per_stage)] if plan.layers_per_stage else []
    rest = f"+{plan.recompute_rest}" if plan.recompute_rest != Recompute.none else ""
    parts += [f"rc-{plan.recompute}{plan.recompute_layers or ''}{rest}"] if plan.recompute != Recompute.none else []
    parts += [f"lc{plan.loss_chunks}"] if plan.loss_chunks > 1 else []
    parts += offload_name_parts(plan)
    parts += [f"{plan.context}{plan.ulysses or ''}"] if plan.context != ContextParallelMethod.ring else []
    parts += ["place" + format_number_list(plan.placement)] if plan.placement else []
    parts += ["ga" + format_number_list(plan.shares)] if plan.shares else []
    parts += ["zw" + format_number_list(plan.shard_weights)] if plan.shard_weights else []
    parts += ["compile"] if plan.compile else []
    parts += ["order-" + "-".join(plan.axes)] if plan.axes != MESH_AXES else []
    return ".".join(parts)


def offload_name_parts(plan: Plan) -> list[str]:
    """What waits elsewhere, as parts of a name.

    >>> offload_name_parts(parse_plan("dp2.z3.off-optimizer-disk60.off-parameters50.off-activations"))
    ['off-optimizer-disk60', 'off-parameters50', 'off-activations']
    """
    numbers = {
        what: getattr(plan, field)
        for what, field in OFFLOAD_AMOUNT_FIELDS.items()
        if getattr(plan, field) != Plan.model_fields[field].default
    }
    return [f"off-{what}{numbers.get(what, '')}" for what in plan.offload]


_NUMBER_TOKENS = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "z": "zero", "mb": "micro_batch", "lc": "loss_chunks"}
_LIST_TOKENS = {"ls": "layers_per_stage", "place": "placement", "ga": "shares", "zw": "shard_weights"}
_FLAG_TOKENS = {
    "compile": ("compile", True),
    "sp": ("sequence_parallel", True),
    "ring": ("context", "ring"),
    "ulysses": ("context", "ulysses"),
}
_EXAMPLE_TOKENS = (
    *(
        "dp8",
        "dp2x4",
        "tp2",
        "sp",
        "pp4",
        "cp2",
        "ep2",
        "z1",
        "mb2",
        "mb8-2",
        "gpipe",
        "1f1b",
        "interleaved2",
        "zbh1",
        "zbv",
        "dualpipev",
    ),
    *(
        "ls10-11-11",
        "rc-attn",
        "rc-sac",
        "rc-sac8",
        "rc-full",
        "compile",
        "rc-full8",
        "rc-full8+sac",
        "lc8",
        "off-optimizer",
        "off-optimizer-disk",
        "off-optimizer-disk60",
        "off-parameters-disk",
        "off-parameters-disk50",
        "off-activations8",
        "off-activations-disk8",
        "ulysses",
        "ga6-2",
        "zw3-1",
        "place0-1",
        "order-dp-pp-tp",
    ),
)


def parse_plan(name: str) -> Plan:
    """The plan that `name` says.

    >>> parse_plan("dp2x4.tp2.z3.rc-full").world
    16
    """
    fields: dict[str, object] = {}
    dp: tuple[int, int | None] = (1, None)
    offload: list[str] = []

    def put(field: str, value: object, part: str) -> None:
        if field in fields:
            raise InputError(f"plan {name!r}: {part!r} says {field} a second time")
        fields[field] = value

    for part in name.split("."):
        match = re.fullmatch(r"([a-z]+)(\d+)(?:x(\d+))?", part)
        if match and match[1] == "dp":
            put("dp", True, part)
            dp = (int(match[2]), int(match[3]) if match[3] else None)
        elif match and match[1] in _NUMBER_TOKENS and not match[3]:
            put(_NUMBER_TOKENS[match[1]], int(match[2]), part)
        elif match and match[1] == "interleaved" and not match[3]:
            put("schedule", "interleaved", part)
            fields["virtual_stages"] = int(match[2])
        elif part in ("gpipe", "1f1b", "zbh1", "zbv", "dualpipev"):
            put("schedule", part, part)
            fields["virtual_stages"] = STAGES_PER_RANK.get(ScheduleName(part), 1)
        elif part.startswith("csv-"):
            raise InputError(
                f"plan {name!r}: the actions behind {part!r} stand in a plan's file, not in its name: give the file"
            )
        elif part in _FLAG_TOKENS:
            put(*_FLAG_TOKENS[part], part)
        elif re.fullmatch(r"ulysses\d+", part):
            put("context", "ulysses", part)
            fields["ulysses"] = int(part[7:])
        elif (again := re.fullmatch(r"rc-(none|attn|sac|full)(\d*)(?:\+(sac))?", part)) is not None:
            put("recompute", again[1], part)
            fields["recompute_layers"], fields["recompute_rest"] = int(again[2] or 0), again[3] or Recompute.none
        elif (sizes := re.fullmatch(r"mb(\d+(?:x\d{1,5})?(?:-\d+(?:x\d{1,5})?)+)", part)) is not None:
            put("micro_batch", max(parse_number_list(sizes[1])), part)
            fields["micro_batch_sizes"] = parse_number_list(sizes[1])
        elif (numbers := re.fullmatch(r"(ls|place|ga|zw)(\d+(?:x\d{1,5})?(?:-\d+(?:x\d{1,5})?)*)", part)) is not None:
            put(_LIST_TOKENS[numbers[1]], parse_number_list(numbers[2]), part)
        elif re.fullmatch(r"order(-(pp|dp|tp)){3}", part):
            put("axes", tuple(part[6:].split("-")), part)
        elif (away := re.fullmatch(r"off-([a-z-]+?)(\d*)", part)) and away[1] in (
            OFFLOAD_AMOUNT_FIELDS if away[2] else list(Offload)
        ):
            offload.append(away[1])
            if away[2]:
                put(OFFLOAD_AMOUNT_FIELDS[Offload(away[1])], int(away[2]), part)
        else:
            raise InputError(
                f"plan {name!r}: part {part!r} is not understood{did_you_mean(part, _EXAMPLE_TOKENS)}; parts are such as {', '.join(_EXAMPLE_TOKENS)}"
            )
    fields.pop("dp", None)
    if dp[1] is not None:
        fields["dp_replicate"], fields["dp_shard"] = dp[0], dp[1]
    else:
        fields["dp_shard" if fields.get("zero") else "dp_replicate"] = dp[0]
    return validate_data(Plan, {**fields, "offload": tuple(offload)}, f"plan {name!r}")


__all__ = [
    "ACTIVATION_OFFLOADS",
    "DEFAULT_BUCKET_BYTES",
    "DISK_OFFLOADS",
    "EXCLUSIVE_OFFLOADS",
    "MESH_AXES",
    "OPTIMIZER_OFFLOADS",
    "PARAMETER_OFFLOADS",
    "PER_BLOCK_RECOMPUTE",
    "STAGES_PER_RANK",
    "ContextParallelMethod",
    "MeshAxis",
    "Offload",
    "Plan",
    "Recompute",
    "ScheduleName",
    "is_v_shape",
    "offload_name_parts",
    "offloads_activations",
    "offloads_states",
    "offloads_weights",
    "parse_plan",
    "plan_name",
    "stage_to_rank",
]  # fmt: skip
