"""Writes the tables of flags in `coming-from/`: the keys of another system beside the parts of a plan and of a job.

A row is the difference of two exports (`meshwright.interop.system.encode`): one with the part, one without it. So the
tables say what `meshwright export` writes and what `meshwright import` reads, and every key of a system is on its page.
`docs/generate.py` runs this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.interop.comparison import show_key
from meshwright.interop.registry import SYSTEMS
from meshwright.interop.settings import SIZE_FIELDS, settings_of
from meshwright.interop.system import System, encode
from meshwright.planner.inputs.model_parser import read_sizes
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import OptimizerConfig, Workload

DOCS = Path(__file__).parent
STAGES = ("", ".z1", ".z3", ".z2")
KEPT = ("pp2", "tp2")
"""Degrees that the plan without a part has too, if they follow the part."""
PLAN_PARTS = {
    ("tp2", "tp2.sp"): ("tensor parallelism", "张量并行"),
    ("tp2.sp",): ("tensor and sequence parallelism", "张量并行加序列并行"),
    ("pp2",): ("pipeline", "流水线"),
    ("pp2.gpipe",): ("GPipe schedule", "GPipe 调度"),
    ("pp2.interleaved2",): ("interleaved schedule", "交错调度"),
    ("pp2.zbv",): ("zero-bubble schedule", "零气泡调度"),
    ("pp2.dualpipev",): ("DualPipeV", "DualPipeV"),
    ("pp2.ls1-3",): ("unequal stages", "不等长的阶段"),
    ("cp2",): ("context parallelism, ring", "上下文并行（环）"),
    ("cp2.ulysses",): ("context parallelism, Ulysses", "上下文并行（Ulysses）"),
    ("cp4.ulysses2",): ("Ulysses in rings", "环中的 Ulysses"),
    ("ep2",): ("expert parallelism", "专家并行"),
    ("ep2.tp2", "ep2.tp2.sp"): ("expert and tensor parallelism", "专家并行加张量并行"),
    ("z0",): ("replicas (DDP)", "副本（DDP）"),
    ("z1",): ("ZeRO-1: sharded optimizer states", "ZeRO-1：分片优化器状态"),
    ("z2",): ("ZeRO-2: sharded gradients too", "ZeRO-2：也分片梯度"),
    ("z3",): ("ZeRO-3: sharded weights too", "ZeRO-3：也分片权重"),
    ("dp2x2.z3", "dp2x2.z1"): ("replicas of shard groups (HSDP)", "分片组的副本（HSDP）"),
    ("mb4",): ("sequences of a micro-batch", "一个微批的序列数"),
    ("mb4.pp2",): ("micro-batch in a pipeline", "流水线中的微批"),
    ("rc-full",): ("recompute of whole blocks", "重计算整个块"),
    ("rc-full.pp2",): ("recompute in a pipeline", "流水线中的重计算"),
    ("rc-full2",): ("recompute of two blocks of a stage", "每个阶段只重计算两块"),
    ("rc-attn",): ("recompute of the attention core", "只重计算注意力核心"),
    ("rc-sac",): ("selective recompute", "选择性重计算"),
    ("off-optimizer", "off-optimizer.off-gradients", "off-optimizer.off-gradients.off-parameters"): (
        "offload to CPU",
        "卸载到 CPU",
    ),
    ("off-parameters",): ("weights to CPU", "权重卸载到 CPU"),
    ("off-optimizer-disk",): ("offload to NVMe", "卸载到 NVMe"),
    ("off-optimizer50", "off-optimizer50.off-gradients"): ("offload of half of the states", "卸载一半状态"),
    ("compile",): ("compiled blocks", "编译各块"),
    ("order-dp-pp-tp.tp2",): ("order of the axes", "轴的次序"),
}
"""Parts of the name of a plan, with their meaning in both languages. Of several spellings, a system gets the first that
it can run."""
WORKLOAD_PARTS: dict[str, tuple[str, Any, str, str]] = {
    "batch: 32": ("batch", 32, "sequences of a step, of all devices", "所有设备一步的序列数"),
    "sequence: 1024": ("sequence", 1024, "tokens of a sequence", "一条序列的 token 数"),
    "steps: 500": ("steps", 500, "steps", "步数"),
    "precision: fp32": ("precision", "fp32", "precision", "精度"),
    "precision: bf16": ("precision", "bf16", "", ""),
    "precision: bf16-pure": ("precision", "bf16-pure", "", ""),
    "precision: fp16": ("precision", "fp16", "", ""),
    "precision: fp8": ("precision", "fp8", "", ""),
    "reduce: bf16": ("reduce", "bf16", "dtype of gradients", "梯度的数据类型"),
    "reduce: fp32": ("reduce", "fp32", "", ""),
    "seed: 7": ("seed", 7, "seed", "随机种子"),
    "expert_capacity: 1.25": ("expert_capacity", 1.25, "capacity factor of experts", "专家容量系数"),
    "expert_bias_rate: 0.001": ("expert_bias_rate", 0.001, "bias of the router", "路由偏置的步长"),
    "optimizer.name: adamw": ("name", "adamw", "optimizer", "优化器"),
    "optimizer.name: adam": ("name", "adam", "", ""),
    "optimizer.name: sgd": ("name", "sgd", "", ""),
    "optimizer.name: sgd-momentum": ("name", "sgd-momentum", "", ""),
    "optimizer.name: muon": ("name", "muon", "", ""),
    "optimizer.lr: 0.0005": ("lr", 5e-4, "learning rate", "学习率"),
    "optimizer.schedule: cosine": ("schedule", "cosine", "decay of the learning rate", "学习率的衰减"),
    "optimizer.schedule: linear": ("schedule", "linear", "", ""),
    "optimizer.schedule: constant": ("schedule", "constant", "", ""),
    "optimizer.schedule: warmup-stable-decay": ("schedule", "warmup-stable-decay", "", ""),
    "optimizer.warmup: 50": ("warmup", 50, "steps of warmup", "预热步数"),
    "optimizer.final_lr: 0.2": ("final_lr", 0.2, "last learning rate", "最后的学习率"),
    "optimizer.betas: [0.85, 0.98]": ("betas", (0.85, 0.98), "betas", "betas"),
    "optimizer.eps: 1e-07": ("eps", 1e-7, "epsilon", "epsilon"),
    "optimizer.weight_decay: 0.05": ("weight_decay", 0.05, "weight decay", "权重衰减"),
    "optimizer.decay: matrices": ("decay", "matrices", "parameters with weight decay", "有权重衰减的参数"),
    "optimizer.decay: all": ("decay", "all", "", ""),
    "optimizer.clip: 0.5": ("clip", 0.5, "norm of clipping", "裁剪的范数"),
}
"""Entries of the section `workload` of a job, likewise."""
WORDS = {
    "en": {
        "heading": "## Flags",
        "made": "*Made from the tables of `meshwright.interop` by `docs/generate.py`; a test keeps it true.*",
        "head": "| | {title} | here |",
        "model": "model",
        "default": "the default",
        "lost": "{title} has no equivalent of {parts}.",
        "read": "An import also reads {keys}.",
        "comma": ", ",
    },
    "zh": {
        "heading": "## 参数对照",
        "made": "*由 `docs/generate.py` 根据 `meshwright.interop` 的对照表生成；有测试保证其与程序一致。*",
        "head": "| | {title} | 这里 |",
        "model": "模型",
        "default": "默认",
        "lost": "{title} 没有与 {parts} 相当的功能。",
        "read": "导入时也读 {keys}。",
        "comma": "、",
    },
}
PLACES = ("world", "nodes", "devices_per_node")
"""Settings of the launch line."""
MODEL_SETTINGS = ("untied", "model", "name", "flavor")
SIZES = read_sizes("llama2-7b").but(layers=4, experts=8, top_k=2, moe_ffn=2048)
USUAL = Workload(
    batch=64, sequence=2048, steps=1000, precision="bf16", reduce="bf16", optimizer=OptimizerConfig(lr=1e-3)
)
OTHERS = {"precision": "fp32", "reduce": "fp32", "schedule": "constant", "name": "sgd-momentum"}
"""Values with which a row is compared whose value is the usual one."""


class FlagRow(NamedTuple):
    """A part of a plan or of a job. `there` are the keys that it has in a system, with their values; None if the system
    has no equivalent."""

    here: str
    there: dict[str, Any] | None
    meaning: tuple[str, str]


def changed_keys(system: System, plans: tuple[Plan, Plan], workloads: tuple[Workload, Workload]) -> dict[str, Any]:
    """The keys of the first plan and workload that the second have not, or with another value."""
    made = [
        encode(system, settings_of(plan, workload, SIZES, model="llama3-8b"))
        for plan, workload in zip(plans, workloads, strict=True)
    ]
    places = {key.name for key in system.keys if key.setting in PLACES}
    return {name: value for name, value in made[0].items() if made[1].get(name) != value and name not in places}


def can_run(system: System, plan: Plan) -> bool:
    limit = system.limit_of(plan)
    return not limit.violations(plan) and not limit.rule(plan)


def plan_rows(system: System) -> Iterator[FlagRow]:
    for spellings, meaning in PLAN_PARTS.items():
        found = ((part, *pair) for part in spellings for pair in pairs_of(part) if can_run(system, pair[0]))
        part, plan, other = next(found, (spellings[0], None, Plan()))
        there = changed_keys(system, (plan, other), (USUAL, USUAL)) if plan is not None else None
        yield FlagRow(f"`{part.removesuffix('.' + kept_of(part))}`", there, meaning)


def pairs_of(part: str) -> Iterator[tuple[Plan, Plan]]:
    """Plans that have a part, each beside the same plan without it."""
    if re.fullmatch(r"z\d", part):
        plan = parse_plan(f"dp4.{part}".removesuffix(".z0"))
        yield from ((plan, other) for stage in STAGES if (other := parse_plan(f"dp4{stage}")) != plan)
        return
    if part.startswith("dp"):
        yield parse_plan(part), parse_plan(f"dp4.{part.partition('.')[2]}")
        return
    kept = kept_of(part)
    for stage in STAGES:
        with suppress(InputError):
            plan = parse_plan(f"dp4.{part}{stage}")
            other = parse_plan(f"dp4.{kept}{stage}".replace("..", ".").rstrip("."))
            if plan.zero == other.zero:  # a part may imply a stage, as ep does
                yield plan, other


def kept_of(part: str) -> str:
    """The degree that also the plan without a part has."""
    return next((degree for degree in KEPT if degree in part.split(".")[1:]), "")


def workload_rows(system: System) -> Iterator[FlagRow]:
    plan = next(plan for stage in STAGES if can_run(system, plan := parse_plan(f"dp4{stage}")))
    names = {key.setting for key in system.keys}
    before = ("", "")
    for here, (field, value, *meaning) in WORKLOAD_PARTS.items():
        before = (meaning[0] or before[0], meaning[1] or before[1])
        setting = {"name": "optimizer", "schedule": "decay", "decay": "decayed", "betas": "beta1"}.get(field, field)
        made = with_field(USUAL, field, value)
        others = [USUAL, *([with_field(USUAL, field, OTHERS[field])] if field in OTHERS else [])]
        found = [keys for other in others if (keys := changed_keys(system, (plan, plan), (made, other)))]
        allowed = system.workload.get(setting)
        known = value in allowed if allowed is not None else found or setting in names
        yield FlagRow(f"`{here}`", next(iter(found), {}) if known else None, before)


def with_field(workload: Workload, field: str, value: Any) -> Workload:
    if field == "precision":  # with gradients of the compute dtype
        return workload.but(precision=value, reduce=value if value in ("bf16", "fp16") else None)
    if field in Workload.model_fields:
        return workload.but(**{field: value})
    return workload.but(optimizer=workload.optimizer.but(**{field: value}))


def meaningless_keys(system: System) -> set[str]:
    """The keys that a system needs and that no setting determines."""
    return {name for key in system.keys if key.setting == "engine" for name in (key.name, *key.also)}


def flag_table(system: System, language: str) -> str:
    """The table of a system, the parts that it has no equivalent of, and the other keys that an import reads."""
    words, at = WORDS[language], list(WORDS).index(language)
    model = [key.name for key in system.keys if key.setting in (*SIZE_FIELDS, *MODEL_SETTINGS)]
    lines = [words["made"], "", words["head"].format(title=system.title), "|---|---|---|"]
    known: list[FlagRow] = []
    lost: list[str] = []
    for row in (*plan_rows(system), *workload_rows(system)):
        if row.there is None:
            lost.append(row.here)
        elif not row.there or row.there not in [each.there for each in known]:
            known.append(row)
            keys = ", ".join(f"`{show_key(name, value)}`".replace("|", "\\|") for name, value in row.there.items())
            lines.append(f"| {row.meaning[at]} | {keys or words['default']} | {row.here} |")
    if model:
        lines.append(f"| {words['model']} | {', '.join(f'`{name}`' for name in model)} | `model` |")
    lost = [here for here in dict.fromkeys(lost) if here not in {row.here for row in known}]
    shown = {*model, *(name for row in known for name in row.there or ()), *meaningless_keys(system)}
    rest = [f"`{name}`" for name in sorted(system.own_keys - shown) if name.removeprefix("--") not in shown]
    lines += ["", words["lost"].format(title=system.title, parts=words["comma"].join(lost))] if lost else []
    lines += ["", words["read"].format(keys=words["comma"].join(rest))] if rest else []
    return "\n".join(lines)


def write(folder: Path = DOCS) -> None:
    """Replaces the section of flags in the page of each system, in both languages."""
    for language, words in WORDS.items():
        for name, system in SYSTEMS.items():
            path = Path(language) / "coming-from" / f"{name.replace('_', '-')}.md"
            before, heading, rest = (DOCS / path).read_text(encoding="utf-8").partition(f"\n{words['heading']}\n")
            after = rest.partition("\n## ")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = f"{before}{heading}\n{flag_table(system, language)}\n{''.join(after[1:])}"
            (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in SYSTEMS.values():
        print(flag_table(each, "en"))
