"""torchtitan: the TOML job configuration of versions 0.2, the Python configuration of version 0.3
(torchtitan_python.py), and their launch lines.

Sources, at version 0.2.2 of pytorch/torchtitan: torchtitan/config/job_config.py (keys and defaults),
torchtitan/models/llama3/infra/parallelize.py, torchtitan/distributed/pipeline_parallel.py (stages),
torchtitan/train.py (batch, loss). Version 0.3 has the same keys of the sections training, parallelism, lr_scheduler and
compile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line, write_toml
from meshwright.interop.settings import Settings
from meshwright.interop.system import (
    ABSENT,
    ANY,
    Key,
    NumericsNote,
    OneOf,
    PlanSpaceLimit,
    System,
    read_nothing,
    read_only,
    remark_value,
    write_only,
)
from meshwright.interop.torchtitan_python import SECTIONS, python_config
from meshwright.spec.enums import Offload, Recompute
from meshwright.spec.plan import Plan

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
AC_OPTION = "activation_checkpoint.selective_ac_option"
LOOPED = ("interleaved", "zbv", "dualpipev")
FUNCTION = re.compile(r"(?P<name>llama3|qwen3|deepseek_v3|gpt_oss)_(?P<size>\d+(?:_\d+)?b)")
LAYER = re.compile(r"layers\.\d+")
MODEL = re.compile(r"(?P<name>llama3|llama4|qwen3|deepseek_v3|gpt_oss)[-_.]?(?P<flavor>[\w.]+)", re.IGNORECASE)


def _stage_layers(settings: Settings) -> tuple[int, ...]:
    """Returns the blocks of each stage, or () if torchtitan divides them in the same way: evenly over the number of
    stages that the schedule has without other keys."""
    stages, blocks = tuple(settings["layers_per_stage"]), settings.get("model_layers", 0)
    count = settings["pp"] * settings["virtual_stages"]
    usual = settings["virtual_stages"] == (2 if settings["schedule"] in LOOPED else 1) and blocks % count == 0
    if settings["pp"] > 1 and not stages and not usual and blocks >= count:
        return tuple(blocks // count + (stage < blocks % count) for stage in range(count))
    return stages


def _module_names(settings: Settings) -> Any:
    """Returns the module names of each stage."""
    stages = _stage_layers(settings)
    if not stages:
        return ABSENT
    parts, first = [], 0
    for layers in stages:
        parts.append([f"layers.{at}" for at in range(first, first + layers)])
        first += layers
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


def _read_module_names(value: Any, keys: Mapping[str, Any]) -> Settings:
    stages = tuple(sum(bool(LAYER.fullmatch(name)) for name in part) for part in value)
    pp = keys.get("parallelism.pipeline_parallel_degree", 1)
    found = {"virtual_stages": max(len(stages) // pp, 1), "model_layers": sum(stages)}
    return found | ({"layers_per_stage": stages} if min(stages) else {})


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets what depends on several keys: ZeRO, the batch of a pipeline, virtual stages, precision, offload."""
    get = {
        name: keys.get(f"parallelism.{name}") for name in ("data_parallel_shard_degree", "fsdp_reshard_after_forward")
    }
    shard, tp, pp, cp = get["data_parallel_shard_degree"] or -1, *(settings.get(axis, 1) for axis in ("tp", "pp", "cp"))
    replicate = settings.get("dp_replicate", 1)
    if "devices_per_node" in settings:
        settings.setdefault("world", settings["devices_per_node"] * settings.get("nodes", 1))
    if shard < 1 and "world" not in settings:
        raise InputError(
            Message("data_parallel_shard_degree is -1 and the number of devices is in no file: --devices sets it")
        )
    if keys.get("activation_checkpoint.mode") == "selective" and keys.get(AC_OPTION, "2") != "op":
        settings["recompute"] = "none"
        remark_value(settings, AC_OPTION, keys.get(AC_OPTION, "2"))
    world = settings.get("world") or replicate * max(shard, 1) * tp * pp * cp
    shard = world // (replicate * tp * pp * cp) if shard < 1 else shard
    settings["dp_shard"] = max(shard, 1)
    reshard = get["fsdp_reshard_after_forward"] or "default"
    gathered_once = reshard == "never" or (reshard == "default" and pp > 1)
    settings["zero"] = 0 if settings["dp_shard"] * cp == 1 else 2 if gathered_once else 3
    settings["sequence_parallel"] = tp > 1
    local, whole = keys.get("training.local_batch_size", 8), keys.get("training.global_batch_size", -1)
    settings["micro_batch"] = keys.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    if whole and whole > 0:
        settings["batch"] = whole
    else:
        settings["accumulation"] = local // settings["micro_batch"]
    schedule = settings.get("schedule", "1f1b")
    looped = schedule in LOOPED
    if pp > 1 and "virtual_stages" not in settings:
        settings["virtual_stages"] = 2 if looped else 1
    per_stage, blocks = keys.get("parallelism.pipeline_parallel_layers_per_stage"), settings.get("model_layers")
    if pp > 1 and per_stage and blocks:
        settings["virtual_stages"] = max(-(-blocks // (per_stage * pp)), 1)
    elif pp > 1 and per_stage:
        settings.setdefault("remarks", []).append(
            Message(
                "{key}={value}: the number of layers is in no file, {stages} stages a rank are assumed",
                key="parallelism.pipeline_parallel_layers_per_stage",
                value=per_stage,
                stages=settings["virtual_stages"],
            )
        )
    if settings.get("offload_all") and settings["zero"] == 3:
        settings["offload"] = ("optimizer", "gradients", "parameters")
    converters = keys.get("model.converters", ())
    if any("float8" in str(each) for each in converters):
        settings["precision"] = "fp8"
    _set_decay(settings, keys)
    flavor = f"{settings.get('name', '')}-{settings.get('flavor', '')}".lower()
    if "name" in settings:
        settings["model"] = flavor


def _set_decay(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the schedule of the learning rate: linear without other keys."""
    if keys.get("lr_scheduler.decay_ratio") is not None:
        ratio = keys["lr_scheduler.decay_ratio"]
        settings["decay"] = "constant" if ratio == 0 else "warmup-stable-decay"
        settings |= {"cooldown": ratio} if ratio else {}
    kind = keys.get("lr_scheduler.decay_type", "linear")
    if settings.get("decay") == "warmup-stable-decay" and kind == "cosine":
        remark_value(settings, "lr_scheduler.decay_type", kind)
    settings.setdefault("decay", "linear")
    if kind == "sqrt":
        remark_value(settings, "lr_scheduler.decay_type", kind)


def _model_part(part: str) -> Any:
    def write(settings: Settings) -> Any:
        found = MODEL.fullmatch(settings.get("model") or "")
        return ABSENT if found is None else found["name"].lower() if part == "name" else found["flavor"].upper()

    return write


def _read_function(value: Any, keys: Mapping[str, Any]) -> Settings:
    """Converts the name of a function of version 0.3, such as qwen3_0_6b: the model and its size."""
    found = FUNCTION.match(str(value))
    settings: Settings = {"model": f"{found['name']}-{found['size'].replace('_', '.')}" if found else str(value)}
    if "config" in keys:
        return settings
    remark = Message(
        "--config {function}: the settings of this function are not read; give its file, or write them as options",
        function=value,
    )
    return {**settings, "remarks": [remark]}


KEYS = (
    Key("model.name", "name", write=_model_part("name")),
    Key("model.flavor", "flavor", write=_model_part("flavor")),
    write_only(
        "model.converters", "converters", lambda s: ["quantize.linear.float8"] if s["precision"] == "fp8" else ABSENT
    ),
    Key(
        "optimizer.name",
        "optimizer",
        {"adamw": "AdamW", "adam": "Adam"},
        default="AdamW",
        also=("optimizer.param_groups[0].optimizer_name",),
    ),
    Key("optimizer.lr", "lr", default=8e-4),
    Key("optimizer.beta1", "beta1", default=0.9),
    Key("optimizer.beta2", "beta2", default=0.95),
    Key("optimizer.eps", "eps", default=1e-8),
    Key("optimizer.weight_decay", "weight_decay", default=0.1),
    Key("lr_scheduler.warmup_steps", "warmup", default=200, always=True),
    Key(
        "lr_scheduler.decay_type",
        "decay",
        write=lambda s: "cosine" if s["decay"] == "cosine" else "linear",
        read=lambda v, k: {} if v == "sqrt" else {"decay": v},
    ),
    write_only(
        "lr_scheduler.decay_ratio",
        "cooldown",
        lambda s: {"constant": 0.0, "warmup-stable-decay": s["cooldown"]}.get(s["decay"], ABSENT),
    ),
    Key("lr_scheduler.min_lr_factor", "final_lr", default=0.0),
    write_only(
        "training.local_batch_size", "local_batch", lambda s: s["local_batch"] if s["pp"] > 1 else s["micro_batch"]
    ),
    write_only("training.global_batch_size", "batch", lambda s: s["batch"]),
    Key("training.seq_len", "sequence", default=2048),
    Key(
        "training.max_norm",
        "clip",
        write=lambda s: s["clip"] or float("inf"),
        read=lambda v, k: {"clip": None if v == float("inf") else v},
    ),
    Key("training.steps", "steps", default=10000),
    Key(
        "training.enable_cpu_offload",
        "offload",
        write=lambda s: bool(s["offload"]) or ABSENT,
        read=lambda v, k: {"offload_all": v},
    ),
    Key(
        "training.dtype",
        "precision",
        {"bf16": "float32", "fp8": "float32", "bf16-pure": "bfloat16", "fp32": "float32"},
        default="float32",
    ),
    Key(
        "training.mixed_precision_param",
        "precision",
        {"bf16": "bfloat16", "fp8": "bfloat16", "bf16-pure": "bfloat16", "fp32": "float32"},
        default="bfloat16",
    ),
    Key("training.mixed_precision_reduce", "reduce", {"fp32": "float32"}, default="float32"),
    Key("parallelism.data_parallel_replicate_degree", "dp_replicate", default=1, always=True),
    write_only("parallelism.data_parallel_shard_degree", "dp_shard", lambda s: s["dp_shard"]),
    write_only(
        "parallelism.fsdp_reshard_after_forward", "zero", lambda s: {2: "never", 3: "always"}.get(s["zero"], ABSENT)
    ),
    Key("parallelism.tensor_parallel_degree", "tp", default=1, always=True),
    Key("parallelism.pipeline_parallel_degree", "pp", default=1, always=True),
    Key("parallelism.pipeline_parallel_schedule", "schedule", SCHEDULES, default="1F1B"),
    write_only(
        "parallelism.pipeline_parallel_microbatch_size",
        "micro_batch",
        lambda s: s["micro_batch"] if s["pp"] > 1 else ABSENT,
    ),
    read_only("parallelism.pipeline_parallel_layers_per_stage", "virtual_stages", read_nothing),
    Key("parallelism.module_fqns_per_model_part", "layers_per_stage", write=_module_names, read=_read_module_names),
    write_only(
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "first_less",
        lambda s: 0 if s["pp"] > 1 and not _stage_layers(s) else ABSENT,
    ),
    write_only(
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "last_less",
        lambda s: 0 if s["pp"] > 1 and not _stage_layers(s) else ABSENT,
    ),
    Key("parallelism.context_parallel_degree", "cp", default=1),
    Key("parallelism.expert_parallel_degree", "ep", default=1),
    Key(
        "parallelism.expert_tensor_parallel_degree",
        "expert_tp",
        write=lambda s: s["expert_tp"] if s["ep"] > 1 else ABSENT,
    ),
    Key("activation_checkpoint.mode", "recompute", {"none": "none", "full": "full", "sac": "selective"}, always=True),
    write_only(AC_OPTION, "recompute", lambda s: "op" if s["recompute"] == "sac" else ABSENT),
    read_only("activation_checkpoint", "recompute", values={"none": "None", "full": "FullAC", "sac": "SelectiveAC"}),
    read_only("parallelism.enable_sequence_parallel", "sequence_parallel", values={True: OneOf(True, ABSENT)}),
    read_only("config", "model", read=_read_function, also=("--config",)),
    *(read_only(name, "engine", read_nothing) for name in ("--module", "training.disable_cuda_graphs", *SECTIONS)),
    read_only("optimizer.betas", "beta1", read=lambda v, k: {"beta1": v[0], "beta2": v[1]}),
    Key("compile.enable", "compile", default=False),
    Key("debug.seed", "seed", also=("training.seed",)),
)

DEGREES = dict.fromkeys(("dp_shard", "micro_batch", "compile"), ANY) | {
    "dp_replicate": ANY,
    "recompute": (Recompute.none, Recompute.sac, Recompute.full),
}
FSDP = {
    **DEGREES,
    **dict.fromkeys(("tp", "pp", "cp", "ep", "virtual_stages", "layers_per_stage"), ANY),
    "sequence_parallel": (True,),
    "schedule": tuple(SCHEDULES),
}


def _shards(plan: Plan) -> str:
    """Returns why torchtitan would not shard this plan: FSDP2 needs two ranks or more in a shard group."""
    if plan.dp_shard * plan.cp == 1:
        return Message("FSDP2 needs at least two ranks in a shard group")
    return "" if plan.ep == 1 or plan.expert_tp in (1, plan.tp) else Message("expert_tp must be 1 or tp")


LIMITS = (
    PlanSpaceLimit("FSDP2", {**FSDP, "zero": (3, 2)}, _shards),
    PlanSpaceLimit(
        "FSDP2 with offload to CPU",
        {**FSDP, "zero": (3,), "offload": ((Offload.optimizer, Offload.gradients, Offload.parameters),)},
        _shards,
    ),
    PlanSpaceLimit("DDP", {**DEGREES, "zero": (0,)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns the job configuration and the launch script of version 0.2, and those of version 0.3."""
    launch = torchrun_line(settings, "-m torchtitan.train")
    return {
        "train.toml": write_toml(keys),
        "launch.sh": f"{launch} --job.config_file train.toml\n",
        "train_config.py": python_config(keys, settings),
        "launch_0_3.sh": f"PYTHONPATH=. {launch} --module train_config --config train\n",
    }


TORCHTITAN = System(
    name="torchtitan",
    title="torchtitan",
    repository="pytorch/torchtitan",
    version="0.2",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="torchtitan",
    workload={
        "precision": ("bf16", "bf16-pure", "fp8", "fp32"),
        "reduce": ("fp32",),
        "optimizer": ("adamw", "adam"),
        "decayed": ("all",),
    },
    numerics=(
        NumericsNote(
            Message("the loss is the sum over labels divided by the number of labels of the whole batch, as here"),
            "torchtitan/train.py:521",
        ),
        NumericsNote(
            Message(
                "FSDP2 reduces gradients in float32 and stores float32 weights; without a shard group, autocast is used"
            ),
            "torchtitan/models/llama3/infra/parallelize.py:112",
        ),
        NumericsNote(
            Message("weight decay applies to all parameters, also to norms and biases"),
            "torchtitan/components/optimizer.py:297",
        ),
    ),
    renamed={
        "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
        "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
        "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
        "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
        "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
        "training.batch_size": "training.local_batch_size",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "training.compile": "compile.enable",
        "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
        "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
        "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    },
    defaults={"clip": 1.0, "decayed": "all"},
    adjust=_adjust,
)
