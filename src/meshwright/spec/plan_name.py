"""Formats and parses the short name of a plan, such as `dp8.tp2.pp4.z1`.

A name is a list of parts joined by dots. A part is omitted if its field has the default value.

    dp8             8 replicas (ZeRO 0), or a shard group of 8 ranks (ZeRO 1 to 3)
    dp2x4           2 replicas of shard groups of 4
    tpN sp ppN cpN epN zN           degrees, sequence parallelism of the tensor ranks, ZeRO stage
    mbN mb8-2       sequences per micro-batch; 8 and 2 on two data replicas
    gpipe 1f1b interleaved2 zbh1    the schedule (spec/schedules), with the number of virtual stages if it may vary
    csv-DIGEST      a custom schedule: a plan file lists its actions
    ls10-11-11      blocks of each virtual stage; `ls2x14-1` is 14 times 2, then 1
    rc-attn rc-sac rc-full          recompute: the attention core, selective, full
    rc-full8 rc-full8+sac           full for the first 8 blocks of each virtual stage; +sac: selective for the others
    off-optimizer off-gradients off-parameters off-activations      offload to CPU; `-disk` to files
    off-optimizer-disk60 off-parameters50       60 % of the optimizer states of each rank; half of its weights
    off-activations8                the activations of the first 8 blocks of each virtual stage
    ulysses ulysses2                context ranks exchange heads: among all; within pairs, with rings between pairs
    place0-0-1      the group of nodes of each pipeline rank
    ga6-2           micro-batches per step of each data replica
    zw3-1           weights of unequal ZeRO shards
    lc8             chunks of the loss
    compile         torch.compile for each block
    order-dp-pp-tp  the order of axes
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.enums import (
    DEFAULT_SCHEDULE,
    MESH_AXES,
    OFFLOAD_AMOUNT_FIELDS,
    ContextParallelMethod,
    Offload,
    Recompute,
)
from meshwright.spec.schedules.custom import CUSTOM_NAME_PREFIX
from meshwright.spec.schedules.schedule import offered_schedules

MIN_RUN_LENGTH = 5
"""The minimum number of consecutive equal numbers that a name abbreviates, as in `2x14` for 14 times 2."""


def format_number_list(numbers: Sequence[int]) -> str:
    """Returns numbers joined by dashes. At least `MIN_RUN_LENGTH` consecutive equal numbers are abbreviated: `2x14` is
    14 times 2.

    >>> format_number_list((2,) * 14 + (3, 3, 1)), parse_number_list("2x14-3-3-1") == (2,) * 14 + (3, 3, 1)
    ('2x14-3-3-1', True)
    """
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return "-".join(
        f"{number}x{times}" if times >= MIN_RUN_LENGTH else "-".join([str(number)] * times) for number, times in runs
    )


def parse_number_list(text: str) -> tuple[int, ...]:
    """Returns the numbers that `format_number_list` wrote."""
    pairs = [part.partition("x") for part in text.split("-")]
    return tuple(int(number) for number, _, times in pairs for _ in range(int(times or 1)))


def plan_name(plan: Any) -> str:
    """Returns the name of a `Plan`.

    >>> from meshwright.spec.plan import Plan
    >>> plan_name(Plan(dp_shard=8, tp=2, pp=4, zero=1))
    'dp8.tp2.pp4.z1'
    """
    rest = f"+{plan.recompute_rest}" if plan.recompute_rest != Recompute.none else ""
    parts = [
        _data_part(plan),
        f"tp{plan.tp}" if plan.tp > 1 else "",
        "sp" if plan.sequence_parallel else "",
        *(f"{axis}{degree}" for axis, degree in (("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep)) if degree > 1),
        f"z{plan.zero}" if plan.zero else "",
        "mb" + format_number_list(plan.micro_batch_sizes or (plan.micro_batch,)) if plan.micro_batch > 1 else "",
        plan.schedule_rules.name_part(plan.virtual_stages) if plan.schedule != DEFAULT_SCHEDULE else "",
        "ls" + format_number_list(plan.layers_per_stage) if plan.layers_per_stage else "",
        f"rc-{plan.recompute}{plan.recompute_layers or ''}{rest}" if plan.recompute != Recompute.none else "",
        f"lc{plan.loss_chunks}" if plan.loss_chunks > 1 else "",
        *offload_name_parts(plan),
        f"{plan.context}{plan.ulysses or ''}" if plan.context != ContextParallelMethod.ring else "",
        "place" + format_number_list(plan.placement) if plan.placement else "",
        "ga" + format_number_list(plan.shares) if plan.shares else "",
        "zw" + format_number_list(plan.shard_weights) if plan.shard_weights else "",
        "compile" if plan.compile else "",
        "order-" + "-".join(plan.axes) if plan.axes != MESH_AXES else "",
    ]
    return ".".join(filter(None, parts))


def _data_part(plan: Any) -> str:
    if plan.dp_replicate > 1 and plan.dp_shard > 1:
        return f"dp{plan.dp_replicate}x{plan.dp_shard}"
    if plan.zero > 0 and plan.dp_replicate > 1:
        return f"dp{plan.dp_replicate}x1"
    return f"dp{plan.dp}" if plan.dp > 1 or plan.world == 1 else ""


def offload_name_parts(plan: Any) -> list[str]:
    """Returns the parts of the name of a `Plan` for its offloads.

    >>> from meshwright.spec.plan import parse_plan
    >>> offload_name_parts(parse_plan("dp2.z3.off-optimizer-disk60.off-parameters50.off-activations"))
    ['off-optimizer-disk60', 'off-parameters50', 'off-activations']
    """
    fields = type(plan).model_fields
    amounts = {
        what: getattr(plan, field)
        for what, field in OFFLOAD_AMOUNT_FIELDS.items()
        if getattr(plan, field) != fields[field].default
    }
    return [f"off-{what}{amounts.get(what, '')}" for what in plan.offload]


_NUMBER_TOKENS = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "z": "zero", "mb": "micro_batch", "lc": "loss_chunks"}
_LIST_TOKENS = {"ls": "layers_per_stage", "place": "placement", "ga": "shares", "zw": "shard_weights"}
_FLAG_TOKENS = {
    "compile": ("compile", True),
    "sp": ("sequence_parallel", True),
    "ring": ("context", "ring"),
    "ulysses": ("context", "ulysses"),
}
_NUMBER_LIST = r"\d+(?:x\d{1,5})?(?:-\d+(?:x\d{1,5})?)"
_EXAMPLE_TOKENS = (
    *("dp8", "dp2x4", "tp2", "sp", "pp4", "cp2", "ep2", "z1", "mb2", "mb8-2"),
    *(rules.name_part(rules.stages_per_rank) for rules in offered_schedules()),
    *("ls10-11-11", "rc-attn", "rc-sac", "rc-sac8", "rc-full", "compile", "rc-full8", "rc-full8+sac", "lc8"),
    *("off-optimizer", "off-optimizer-disk", "off-optimizer-disk60", "off-parameters-disk", "off-parameters-disk50"),
    *("off-activations8", "off-activations-disk8", "ulysses", "ga6-2", "zw3-1", "place0-1", "order-dp-pp-tp"),
)


def parse_plan_name(name: str) -> dict[str, Any]:
    """Returns the fields of the plan with the short name `name`.

    Raises: InputError with the part of the name that is not understood.

    >>> parse_plan_name("tp2.zbv")
    {'tp': 2, 'schedule': 'zbv', 'virtual_stages': 2, 'dp_replicate': 1, 'offload': ()}
    """
    fields: dict[str, Any] = {}
    dp: tuple[int, int | None] = (1, None)
    offload: list[str] = []

    def put(field: str, value: object, part: str) -> None:
        if field in fields:
            raise InputError(
                Message("plan {name!r}: {part!r} sets {field} a second time", name=name, part=part, field=field)
            )
        fields[field] = value

    for part in name.split("."):
        if match := re.fullmatch(r"dp(\d+)(?:x(\d+))?", part):
            put("dp", True, part)
            dp = (int(match[1]), int(match[2]) if match[2] else None)
        elif (match := re.fullmatch(r"off-([a-z-]+?)(\d*)", part)) and match[1] in (
            OFFLOAD_AMOUNT_FIELDS if match[2] else list(Offload)
        ):
            offload.append(match[1])
            if match[2]:
                put(OFFLOAD_AMOUNT_FIELDS[Offload(match[1])], int(match[2]), part)
        elif part.startswith(CUSTOM_NAME_PREFIX):
            raise InputError(
                Message(
                    "plan {name!r}: the actions of {part!r} are in a plan file, not in the name: give the file",
                    name=name,
                    part=part,
                )
            )
        elif stated := _schedule_fields(part) or _part_fields(part):
            field, *more = stated
            put(field, stated[field], part)
            fields |= {field: stated[field] for field in more}
        else:
            raise InputError(
                Message(
                    "plan {name!r}: part {part!r} is not understood{hint}; parts are such as {example_tokens}",
                    name=name,
                    part=part,
                    hint=did_you_mean(part, _EXAMPLE_TOKENS),
                    example_tokens=", ".join(_EXAMPLE_TOKENS),
                )
            )
    fields.pop("dp", None)
    if dp[1] is not None:
        fields["dp_replicate"], fields["dp_shard"] = dp[0], dp[1]
    else:
        fields["dp_shard" if fields.get("zero") else "dp_replicate"] = dp[0]
    return {**fields, "offload": tuple(offload)}


def _schedule_fields(part: str) -> dict[str, Any] | None:
    return next((stated for rules in offered_schedules() if (stated := rules.parse_name_part(part))), None)


def _part_fields(part: str) -> dict[str, Any] | None:
    """Returns the fields that one part of a name sets, or None for an unknown part. No other part of the name may set
    the first of these fields."""
    if (match := re.fullmatch(r"([a-z]+)(\d+)", part)) and match[1] in _NUMBER_TOKENS:
        return {_NUMBER_TOKENS[match[1]]: int(match[2])}
    if part in _FLAG_TOKENS:
        return dict([_FLAG_TOKENS[part]])
    if match := re.fullmatch(r"ulysses(\d+)", part):
        return {"context": "ulysses", "ulysses": int(match[1])}
    if match := re.fullmatch(r"rc-(none|attn|sac|full)(\d*)(?:\+(sac))?", part):
        return {
            "recompute": match[1],
            "recompute_layers": int(match[2] or 0),
            "recompute_rest": match[3] or Recompute.none,
        }
    if match := re.fullmatch(rf"mb({_NUMBER_LIST}+)", part):
        sizes = parse_number_list(match[1])
        return {"micro_batch": max(sizes), "micro_batch_sizes": sizes}
    if match := re.fullmatch(rf"(ls|place|ga|zw)({_NUMBER_LIST}*)", part):
        return {_LIST_TOKENS[match[1]]: parse_number_list(match[2])}
    if re.fullmatch(r"order(-(pp|dp|tp)){3}", part):
        return {"axes": tuple(part[6:].split("-"))}
    return None
