"""Writes the reference of all keys of job, cluster and device files (`keys.md`) from the specs in the code: default,
unit and meaning. `docs/generate.py` runs this file, and a test compares.

The English meaning of a key is the description of its field, which the JSON schema has too. `keys_zh_CN.po` has its
translation: a meaning that changes has no translation until somebody writes it, and a test fails.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, WithJsonSchema
from pydantic.fields import FieldInfo

from meshwright.core.i18n.catalogue import PoTranslations
from meshwright.core.quantities import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes, LatentAttention
from meshwright.planner.inputs.job import ClusterChoice, JobFile, ModelChoice
from meshwright.spec.cluster import Cluster, ClusterRates, Device, Link, NodeGroup
from meshwright.spec.job import RunConfig
from meshwright.spec.model import TpRule
from meshwright.spec.plan import Plan
from meshwright.spec.precision import DilocoConfig, GradientCompression
from meshwright.spec.workload import DataConfig, LoraConfig, OptimizerConfig, PreferenceConfig, Workload

DOCS = Path(__file__).parent


class Section(NamedTuple):
    """The keys of one mapping of a file: where it is written, its spec, and what it is, in both languages."""

    path: str
    spec: type[BaseModel]
    en: str
    zh: str


JOB = (
    Section("model", ModelChoice, "The model. At most one of the first three keys.", "模型。前三个键最多写一个。"),
    Section(
        "model.sizes",
        ArchitectureSizes,
        "The sizes of the architecture. In an architecture file, `kind`, `layers` and `hidden` are required. "
        "In a job, every key replaces one size of the chosen model.",
        "结构的尺寸。架构文件中必须写 `kind`、`layers` 和 `hidden`。在任务文件中，每个键替换所选模型的一个尺寸。",
    ),
    Section(
        "model.sizes.mla", LatentAttention, "Multi-head latent attention (DeepSeek).", "多头潜在注意力（DeepSeek）。"
    ),
    Section(
        "model.rules[]",
        TpRule,
        "One tensor-parallel rule. Layers are named by their paths inside a block.",
        "一条张量并行规则。层以其在块内的路径命名。",
    ),
    Section("workload", Workload, "What changes the result of training.", "决定训练结果的设置。"),
    Section("workload.optimizer", OptimizerConfig, "The optimizer and the learning rate.", "优化器与学习率。"),
    Section("workload.lora", LoraConfig, "Low-rank adapters.", "低秩适配器。"),
    Section(
        "workload.preference",
        PreferenceConfig,
        "Pairs of a chosen and a rejected answer.",
        "成对的优选回答和拒绝回答。",
    ),
    Section("workload.compression", GradientCompression, "Gradient compression between hosts.", "主机之间的梯度压缩。"),
    Section(
        "workload.local",
        DilocoConfig,
        "Local steps with an outer optimizer (DiLoCo).",
        "本地步加外层优化器（DiLoCo）。",
    ),
    Section("data", DataConfig, "The training data.", "训练数据。"),
    Section(
        "cluster",
        ClusterChoice,
        "The cluster: a name, a file, or a full description in `groups` and `network`.",
        "集群：名字、文件，或用 `groups` 和 `network` 完整描述。",
    ),
    Section(
        "cluster.rates",
        ClusterRates,
        "Rates that replace those of a cluster of equal nodes without `tiers`.",
        "替换节点相同且没有 `tiers` 的集群的速率。",
    ),
    Section(
        "plan",
        Plan,
        "Fields of the plan to fix; all others are chosen by the planner. These are also the keys of a plan "
        "file. In a job, "
        "`name` fixes all of them, and `dp` stands for the product of `dp_replicate` and `dp_shard`.",
        "要固定的方案字段，其余由规划器选择。方案文件也是这些键。在任务文件中，`name` 固定全部字段，`dp` 是 "
        "`dp_replicate` 与 `dp_shard` 之积。",
    ),
    Section("run", RunConfig, "The run. No key changes the result of training.", "运行。这些键都不改变训练结果。"),
)
CLUSTER = (
    Section("", Cluster, "The top level of a cluster file.", "集群文件的最外层。"),
    Section(
        "groups[]",
        NodeGroup,
        "One group of identical nodes. If `device` is a name of the catalog, all other keys have their values "
        "from there.",
        "一组相同的节点。若 `device` 是目录中的名字，其余各键默认取目录中的值。",
    ),
    Section(
        "groups[].link",
        Link,
        "The link in a node, and `network`, the link between nodes.",
        "节点内的链路；节点之间的链路 `network` 的键相同。",
    ),
)
DEVICE = (Section("groups[].device", Device, "One device.", "一个设备。"),)

NOT_WRITTEN = {"described", "local_ranks"}
"""Fields of a job that no file has."""
UNITS = {
    "tokens": ("sequence", "seq"),
    "sequences": ("batch", "exact", "micro_batch", "micro_batch_sizes"),
    "steps": (
        "steps",
        "warmup",
        "checkpoint_every",
        "evaluate_every",
        "replica_check_every",
        "sdc_check_every",
    ),
    "ranks": ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "ulysses", "min_ranks", "replicas"),
    "blocks": ("layers", "dense_first_layers", "recompute_layers", "offload_layers", "layers_per_stage"),
    "features": ("hidden", "head_dim", "ffn", "moe_ffn", "nope", "rope", "v"),
    "pixels": ("image",),
    "micro-batches": ("shares",),
    "percent": ("offload_share", "weights_share"),
    "bytes": ("bucket",),
    "seconds": ("grace_period", "hang_timeout", "rejoin_timeout"),
    "hours": ("failure_hours",),
    "1/hour": ("failures_per_device_hour",),
    "currency/hour": ("price",),
    "watts": ("power_watts",),
    "parameters/s": ("host_update",),
    "index": ("placement",),
    "count": (
        "heads", "kv_heads", "vocab", "norms", "pos_rows", "types", "experts", "top_k", "shared_experts",
        "classes", "channels", "q_lora", "kv_lora", "rank", "virtual_stages", "loss_chunks", "keep", "retries",
        "nodes", "devices", "span", "processors", "version",
    ),
    "ratio": (
        "rope_base", "lr", "betas", "eps", "weight_decay", "momentum", "matrix_lr", "final_lr", "cooldown",
        "clip", "alpha", "beta", "expert_capacity", "expert_bias_rate", "weights", "held_out", "efficiency",
        "sustained", "attention", "share", "adding", "shard_weights", "seed", "zero",
    ),
}  # fmt: skip
"""The unit of every number that is no quantity. `ratio` and `count` have no unit, and the table leaves it blank."""
QUANTITIES = {
    Bytes: "bytes",
    BytesPerSecond: "bytes/s",
    FlopsPerSecond: "FLOP/s",
    Seconds: "seconds",
}
WORDS = {
    "en": {
        "title": "# All keys of job, cluster and device files",
        "made": "*Made from the specs in the code by `docs/generate.py`; a test keeps it true.*",
        "intro": "A file is YAML or JSON. An unknown key is an error that names the nearest known key. A "
        "quantity is a number in "
        "the unit of the table, or a text with a unit: `80 GiB`, `450 GB/s`, `200Gb`, `3 us`, `312 TFLOP/s`. "
        "`--set section.key=value` sets every key of a job on the command line. `meshwright schema` prints the "
        "JSON Schema, "
        "with which an editor completes and checks job files.",
        "head": "| key | type, unit | default | meaning |\n|---|---|---|---|",
        "required": "required",
        "job": "## Job files",
        "cluster": "## Cluster files",
        "device": "## Your own devices",
        "jobs": "The page [plans](plan.md#job-files) shows an example. Sections that a file does not have keep "
        "their defaults.",
        "clusters": "`--cluster FILE` and the key `cluster.path` read a cluster file. `meshwright probe --save "
        "FILE` measures your "
        "machines and writes one. This example has two kinds of nodes, one of them with a device that the "
        "catalog does "
        "not have:",
        "devices": "A device that the catalog does not have is written out under `device`, as in the example "
        "above. `memory`, `bandwidth` and `peak` "
        "are required. Take them from the data sheet, dense rates without sparsity. For all other keys the "
        "default is a usual "
        "value. `meshwright probe` measures what the data sheet does not say.",
        "none": "none",
    },
    "zh": {
        "title": "# 任务、集群与设备文件的全部键",
        "made": "*由 `docs/generate.py` 根据代码中的规格生成；有测试保证其与程序一致。*",
        "intro": "文件是 YAML 或 JSON。未知的键是错误，错误会给出最接近的已知键。带单位的量可以是以表中单位计的数，"
        "也可以是带单位的文本：`80 GiB`、`450 GB/s`、`200Gb`、`3 us`、`312 TFLOP/s`。"
        "命令行上用 `--set section.key=value` 可设置任务的每个键。`meshwright schema` 输出 JSON Schema，"
        "供编辑器补全和检查任务文件。",
        "head": "| 键 | 类型、单位 | 默认值 | 含义 |\n|---|---|---|---|",
        "required": "必填",
        "job": "## 任务文件",
        "cluster": "## 集群文件",
        "device": "## 自己的设备",
        "jobs": "示例见[方案](plan.md#任务文件)。文件中没有的部分取默认值。",
        "clusters": "`--cluster FILE` 和键 `cluster.path` 读取集群文件。`meshwright probe --save FILE` "
        "测量你的机器并写出这样的文件。"
        "下面的例子有两种节点，其中一种用了目录中没有的设备：",
        "devices": "目录中没有的设备完整地写在 `device` 下，如上例。`memory`、`bandwidth` 和 `peak` 必填，"
        "取自数据手册（不计稀疏的稠密速率）。其余各键的默认值是常见的值。数据手册没有的，由 `meshwright probe` "
        "测量。",
        "none": "空",
    },
}
UNITS_ZH = {
    "tokens": "token", "sequences": "序列", "steps": "步", "ranks": "rank",
    "blocks": "块", "features": "特征", "pixels": "像素", "micro-batches": "微批",
    "percent": "%", "bytes": "字节", "seconds": "秒", "hours": "小时",
    "1/hour": "1/小时", "currency/hour": "货币/小时", "watts": "瓦", "parameters/s": "参数/秒",
    "index": "序号", "bytes/s": "字节/秒", "FLOP/s": "FLOP/s", "text": "文本",
    "number": "数", "list": "列表", "mapping": "映射", "names": "名字",
    "true or false": "true 或 false",
}  # fmt: skip
EXAMPLE = """```bash run
cat > cluster.yaml <<'EOF'
name: two kinds of nodes
network: {name: fabric, bandwidth: 200Gb, latency: 6 us}
groups:
  - {nodes: 2, devices: 8, device: a100-80gb}
  - nodes: 1
    devices: 8
    device: {name: mine, memory: 96 GiB, bandwidth: 4 TB/s, peak: {bf16: 500 TFLOP/s, fp32: 60 TFLOP/s}}
    link: {name: mine, bandwidth: 400 GB/s, latency: 3 us}
    host_memory: 1 TiB
    host_bandwidth: 25 GB/s
EOF
meshwright plan --model llama2-7b --cluster cluster.yaml --batch 256 --seq 4096 --top 2 | head -n 8
```"""


@cache
def chinese() -> PoTranslations:
    """Returns the translations of the meanings."""
    with (DOCS / "keys_zh_CN.po").open(encoding="utf-8") as file:
        return PoTranslations(file)  # type: ignore[arg-type]


def sections() -> tuple[Section, ...]:
    """Returns all sections of all files."""
    return (*JOB, *CLUSTER, *DEVICE)


def unit_of(name: str) -> str:
    """Returns the unit of the number `name`, empty if it is in no table."""
    return next((unit for unit, names in UNITS.items() if name in names), "")


def kinds_of(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """Returns what a value may be: the unit of a quantity, `number`, `true or false`, `text`, `list`, `mapping`, or
    each of its possible values in backquotes."""
    origin, inner = get_origin(annotation), get_args(annotation)
    given = [*metadata, *getattr(annotation, "__metadata__", ())]
    for quantity, unit in QUANTITIES.items():
        if any(rule in given for rule in get_args(quantity)[1:] if isinstance(rule, BeforeValidator)):
            return [unit]
    values = next((rule.json_schema.get("enum") for rule in given if isinstance(rule, WithJsonSchema)), None)
    if values or origin is Literal:
        return [f"`{value}`" for value in values or inner]
    if hasattr(annotation, "__metadata__"):
        return kinds_of(annotation.__origin__)
    if origin in (Union, types.UnionType):
        return [kind for each in inner if each is not type(None) for kind in kinds_of(each)]
    if origin is tuple:
        chosen = [kind for kind in kinds_of(inner[0]) if kind.startswith("`")]
        return ["list", *chosen]
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return ["mapping"]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [f"`{value.value}`" for value in annotation]
    return [{bool: "true or false", int: "number", float: "number"}.get(annotation, "text")]


def type_of(name: str, field: FieldInfo, language: str) -> str:
    """Returns the type or the unit of a key, as the table shows it."""
    kinds, unit = list(dict.fromkeys(kinds_of(field.annotation, field.metadata))), unit_of(name)
    if unit in ("count", "ratio") or not set(kinds) & {"number", "list"}:
        unit = ""
    said = [kind for kind in kinds if not (unit and kind == "number")] + ([unit] if unit else [])
    return ", ".join(said) if language == "en" else "，".join(UNITS_ZH.get(kind, kind) for kind in said)


def default_of(field: FieldInfo, language: str) -> str:
    """Returns the default of a key as a file has it."""
    words = WORDS[language]
    if field.is_required():
        return words["required"]
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`" if value else words["none"]
    return f"`{getattr(value, 'value', value)}`" if value not in ("", {}) else words["none"]


def table(section: Section, language: str) -> str:
    """Returns the keys of one section."""
    rows = [WORDS[language]["head"]]
    for name, field in section.spec.model_fields.items():
        if name in NOT_WRITTEN:
            continue
        meaning = field.description or ""
        said = meaning if language == "en" else chinese().gettext(meaning)
        rows.append(f"| `{name}` | {type_of(name, field, language)} | {default_of(field, language)} | {said} |")
    return "\n".join(rows)


def page(language: str) -> str:
    """Returns the whole page."""
    words = WORDS[language]
    parts = [words["title"], words["made"], words["intro"]]
    for file, listed, said, shown in (
        ("job", JOB, "jobs", ""),
        ("cluster", CLUSTER, "clusters", EXAMPLE),
        ("device", DEVICE, "devices", ""),
    ):
        parts += [words[file], words[said], *([shown] if shown else [])]
        for section in listed:
            heading = [f"### `{section.path}`"] if section.path and file != "device" else []
            parts += [*heading, getattr(section, language), table(section, language)]
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    """Writes the page of both languages below `folder`."""
    for language in WORDS:
        (folder / language).mkdir(parents=True, exist_ok=True)
        (folder / language / "keys.md").write_text(page(language), encoding="utf-8")


assert set(JobFile.model_fields) - NOT_WRITTEN == {section.path.split(".")[0].split("[")[0] for section in JOB}
