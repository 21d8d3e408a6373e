"""Formats and parses the short name of a plan, such as `dp8.tp2.pp4.z1`.

A name is a list of parts joined by dots. A part is omitted if its field has the default value, except `mbN`: a name
without it leaves the micro-batch open.

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

`expand_plan_words` also understands capitals and the words of other systems: ddp8, fsdp8, hsdp2x4, zero3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from math import gcd, prod
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


def is_open(plan: Any) -> bool:
    """Returns whether the micro-batch of a `Plan` is open: neither a name nor a file nor the planner has set it.

    >>> from meshwright.spec.plan import parse_plan
    >>> is_open(parse_plan("dp2")), is_open(parse_plan("dp2.mb1"))
    (True, False)
    """
    return "micro_batch" not in plan.model_fields_set


def plan_name(plan: Any) -> str:
    """Returns the name of a `Plan`.

    >>> from meshwright.spec.plan import Plan
    >>> plan_name(Plan(dp_shard=8, tp=2, pp=4, zero=1, micro_batch=1))
    'dp8.tp2.pp4.z1.mb1'
    """
    rest = f"+{plan.recompute_rest}" if plan.recompute_rest != Recompute.none else ""
    parts = [
        _data_part(plan),
        f"tp{plan.tp}" if plan.tp > 1 else "",
        "sp" if plan.sequence_parallel else "",
        *(f"{axis}{degree}" for axis, degree in (("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep)) if degree > 1),
        f"z{plan.zero}" if plan.zero else "",
        "" if is_open(plan) else "mb" + format_number_list(plan.micro_batch_sizes or (plan.micro_batch,)),
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


_FREQUENT_TOKENS = ("dp8", "tp2", "sp", "pp4", "cp2", "ep2", "z3", "mb2", "rc-full", "off-optimizer")
_WORD_PARTS = {
    r"zero-?([0-3])": r"z\1",
    r"ddp(\d+)": r"dp\1",
    r"fsdp(\d+)": r"dp\1.z3",
    r"hsdp(\d+x\d+)": r"dp\1.z3",
}
"""Words of other systems for parts of a name, as patterns, with the parts that they mean."""
_WORLD_WORDS = {"ddp": "", "fsdp": "z3"}
"""Words for data parallelism over all ranks, with the further part that they mean."""


def expand_plan_words(name: str, world: Callable[[], int] | None = None) -> str:
    """Returns the name of a plan in lower case, with the words of other systems replaced: ddp8 is dp8, fsdp8 is dp8.z3,
    hsdp2x4 is dp2x4.z3, zero3 is z3. `ddp`, `fsdp`, and `zero3` or an expert degree without a data degree, are over all
    ranks that the other parts leave. `world` returns the number of ranks; None: it is unknown.

    Raises: InputError if `name` has the word ddp or fsdp and the number of ranks is unknown or not divisible.

    >>> expand_plan_words("FSDP.tp2", lambda: 8), expand_plan_words("zero3", lambda: 4), expand_plan_words("DP8.zero1")
    ('dp4.tp2.z3', 'dp4.z3', 'dp8.z1')
    """
    parts = name.strip().lower().split(".")
    words = [word for word in parts if word in _WORLD_WORDS]
    for pattern, meaning in _WORD_PARTS.items():
        parts = [re.sub(f"^{pattern}$", meaning, part) for part in parts]
    over_all = words or (any(re.fullmatch("zero-?[1-3]|ep[0-9]+", part) for part in name.lower().split(".")) and world)
    if not over_all or any(part.startswith("dp") and part[2:3].isdigit() for part in parts):
        return ".".join(parts)
    inner = prod(int(match[1]) for part in parts if (match := re.fullmatch(r"(?:tp|pp|cp)([1-9]\d*)", part)))
    if world is None or world() % inner:
        raise InputError(
            Message("plan {name!r}: write the number of data ranks, such as {word}8", name=name, word=words[0])
            if world is None
            else Message(
                "plan {name!r}: its other degrees need a multiple of {inner} ranks, but there are {world}",
                name=name,
                inner=inner,
                world=world(),
            )
        )
    rest = [part for part in parts if part not in _WORLD_WORDS]
    return ".".join(filter(None, [f"dp{world() // inner}", *rest, *(_WORLD_WORDS[word] for word in words)]))


def parse_plan_name(name: str) -> dict[str, Any]:
    """Returns the fields of the plan with the short name `name`. An expert degree that the tensor and context ranks do
    not provide implies ZeRO 1, whose shard group its data ranks are.

    Raises: InputError with the part of the name that is not understood.

    >>> parse_plan_name("tp2.zbv")
    {'tp': 2, 'schedule': 'zbv', 'virtual_stages': 2, 'dp_replicate': 1, 'offload': ()}
    >>> parse_plan_name("dp8.ep4")
    {'ep': 4, 'zero': 1, 'dp_shard': 8, 'offload': ()}
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
                    "plan {name!r}: part {part!r} is not understood{hint}; parts are such as {example_tokens}; write "
                    "`auto` to let the planner choose",
                    name=name,
                    part=part,
                    hint=did_you_mean(part, _EXAMPLE_TOKENS),
                    example_tokens=", ".join(_FREQUENT_TOKENS),
                )
            )
    return {**_with_data_degrees(fields, dp), "offload": tuple(offload)}


def _with_data_degrees(fields: dict[str, Any], dp: tuple[int, int | None]) -> dict[str, Any]:
    """Returns the fields of a name with the data degrees instead of the mark `dp`: `dp` is the degree, or the numbers
    of replicas and of shards. An expert degree that tensor and context ranks do not provide implies ZeRO 1."""
    is_given, inner = fields.pop("dp", False), fields.get("tp", 1) * fields.get("cp", 1)
    degree, shards = dp
    if (ep := fields.get("ep", 1)) > 1 and inner % ep and shards is None:
        degree = degree if is_given else ep // gcd(ep, inner)
        fields["zero"] = fields.get("zero") or 1
    if shards is not None:
        return {**fields, "dp_replicate": degree, "dp_shard": shards}
    return {**fields, "dp_shard" if fields.get("zero") else "dp_replicate": degree}


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
