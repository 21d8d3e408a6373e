"""Megatron-LM: the argument list of `pretrain_gpt.py` with its launch line.

Sources, at commit d98e8a64dd of NVIDIA/Megatron-LM: megatron/training/arguments.py (options, their defaults and the
checks of `validate_args`), megatron/core/transformer/transformer_config.py (recompute, context parallelism) and
megatron/core/transformer/pipeline_parallel_layer_layout.py (the layout string).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.formats import argument_words, torchrun_line
from meshwright.interop.settings import Settings
from meshwright.interop.system import (
    ABSENT,
    ANY,
    FLAG,
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
from meshwright.spec.enums import MESH_AXES, Offload, Recompute

DP_FIRST_AXES = ("dp", "pp", "tp")


def _virtual_stages(value: Any, keys: Mapping[str, Any]) -> Settings:
    """Converts `--num-layers-per-virtual-pipeline-stage`, which needs the number of layers."""
    layers, pp = keys.get("--num-layers"), keys.get("--pipeline-model-parallel-size", 1)
    if not isinstance(layers, int) or layers % (value * pp):
        raise InputError(
            Message(
                "--num-layers-per-virtual-pipeline-stage {value}: --num-layers {layers} is not a multiple of it times "
                "pp({pp})",
                value=value,
                layers=layers,
                pp=pp,
            )
        )
    stages = layers // (value * pp)
    return {"virtual_stages": stages, "schedule": "interleaved" if stages > 1 else "1f1b"}


def _layout(settings: Settings) -> Any:
    """Returns the layout string of uneven stages: E is the embedding, t a layer, L the loss."""
    stages = settings["layers_per_stage"]
    blocks = settings.get("model_layers", 0)
    count = settings["pp"] * settings["virtual_stages"]
    if not stages and blocks % count:
        stages = tuple(blocks // count + (stage < blocks % count) for stage in range(count))
    if not stages or settings["pp"] == 1:
        return ABSENT
    return "E" + "|".join(f"t*{layers}" for layers in stages) + "L"


def _read_layout(value: Any, keys: Mapping[str, Any]) -> Settings:
    """Converts a layout string; the layers of multi-token prediction (m) are not blocks."""
    text = str(value).replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda part: part[1] * int(part[2]), text)
    stages = tuple(stage.count("t") for stage in text.split("|"))
    pp = keys.get("--pipeline-model-parallel-size", 1)
    virtual_stages = max(len(stages) // pp, 1)
    found: Settings = {
        "virtual_stages": virtual_stages,
        "schedule": "interleaved" if virtual_stages > 1 else "1f1b",
        "model_layers": sum(stages),
    }
    return found | ({"layers_per_stage": stages} if min(stages) > 0 else {})


def _first_stage(value: Any, keys: Mapping[str, Any]) -> Settings:
    """Converts `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`: the other stages share
    the remaining layers."""
    layers, pp = keys.get("--num-layers", 0), keys.get("--pipeline-model-parallel-size", 1)
    first, last = (keys.get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    inner = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if not isinstance(layers, int) or inner < 1 or rest % inner:
        raise InputError(
            Message(
                "--decoder-first-pipeline-num-layers {first}, last {last}: {rest} layers do not divide over {inner} "
                "stages",
                first=first,
                last=last,
                rest=rest,
                inner=inner,
            )
        )
    ends = ((first,) if first is not None else ()), ((last,) if last is not None else ())
    return {"layers_per_stage": ends[0] + (rest // inner,) * inner + ends[1]}


def _context_type(settings: Settings) -> Any:
    if settings["cp"] == 1 or settings["context"] == "ring":
        return ABSENT
    return "a2a+p2p" if settings["ulysses"] else "a2a"


def _read_context_type(value: Any, keys: Mapping[str, Any]) -> Settings:
    found: Settings = {"context": "ulysses" if str(value).startswith("a2a") else "ring"}
    sizes = keys.get("--hierarchical-context-parallel-sizes")
    return found | ({"ulysses": sizes[0]} if value == "a2a+p2p" and isinstance(sizes, tuple) else {})


def _recompute_modules(value: Any, keys: Mapping[str, Any]) -> Settings:
    """The module core_attn is the attention core; any other list is selective recompute by operation."""
    if keys.get("--recompute-granularity") != "selective":
        return {}
    modules = value if isinstance(value, tuple) else (value,)
    return {"recompute": str(Recompute.attn if modules == ("core_attn",) else Recompute.sac)}


def _recompute_layers(value: Any, keys: Mapping[str, Any]) -> Settings:
    """With method block, the first layers of each (virtual) stage recompute; with uniform, all layers do."""
    return {"recompute_layers": value} if keys.get("--recompute-method") == "block" else {}


def _torch_fsdp2(value: Any, keys: Mapping[str, Any]) -> Settings:
    return {"zero": 2 if "--torch-fsdp2-no-reshard-after-forward" in keys else 3}


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets what depends on several options: numbers of samples, fractions, and biases that imply others."""
    batch, precision = keys.get("--global-batch-size"), settings.get("precision")
    samples = keys.get("--train-samples")
    if isinstance(samples, int) and isinstance(batch, int):
        settings["steps"] = -(-samples // batch)
    decay, decay_samples = keys.get("--lr-decay-iters", settings.get("steps")), keys.get("--lr-decay-samples")
    if isinstance(decay_samples, int) and isinstance(batch, int):
        decay = -(-decay_samples // batch)
    fraction, warmup_samples = keys.get("--lr-warmup-fraction"), keys.get("--lr-warmup-samples")
    if isinstance(fraction, float) and isinstance(decay, int):
        settings["warmup"] = round(fraction * decay)
    if isinstance(warmup_samples, int) and isinstance(batch, int):
        settings["warmup"] = -(-warmup_samples // batch)
    cooldown = keys.get("--lr-wsd-decay-iters")
    if isinstance(cooldown, int) and settings.get("steps"):
        settings["cooldown"] = min(cooldown / settings["steps"], 1.0)
    _report_schedule(settings, keys, decay)
    if precision == "fp16" and "--accumulate-allreduce-grads-in-fp32" not in keys:
        settings["reduce"] = "fp16"
    if "--num-query-groups" not in keys and "heads" in settings:
        settings["kv_heads"] = settings["heads"]
    if settings.get("linear_bias"):
        settings["qkv_bias"] = True
    if settings.get("recompute") == "sac" and "--recompute-modules" not in keys:
        settings["recompute"] = "attn"
    if settings.get("experts") and "--moe-ffn-hidden-size" not in keys:
        settings["moe_ffn"] = settings.get("ffn")
    if settings.get("pp", 1) > 1 and settings.get("virtual_stages", 1) > 1:
        settings["schedule"] = "interleaved"


def _report_schedule(settings: Settings, keys: Mapping[str, Any], decay: Any) -> None:
    """Reports a decay that does not end with the last step, and one of warmup-stable-decay that is not linear (the
    default there is exponential: megatron/training/arguments.py, --lr-wsd-decay-style)."""
    if isinstance(decay, int) and settings.get("decay") != "constant" and decay != settings.get("steps"):
        remedy = Message("the learning rate falls until the last step here: set workload.steps {decay}", decay=decay)
        key = "--lr-decay-samples" if "--lr-decay-samples" in keys else "--lr-decay-iters"
        remark_value(settings, key, keys.get(key, decay), remedy)
    if settings.get("decay") == "warmup-stable-decay" and keys.get("--lr-wsd-decay-style") != "linear":
        remark_value(settings, "--lr-wsd-decay-style", keys.get("--lr-wsd-decay-style", "exponential"))


MODEL_KEYS = (
    Key("--num-layers", "model_layers"),
    Key("--hidden-size", "hidden"),
    Key("--ffn-hidden-size", "ffn"),
    Key("--num-attention-heads", "heads"),
    write_only("--group-query-attention", "kv_heads", lambda s: _grouped(s, True)),
    Key("--num-query-groups", "kv_heads", write=lambda s: _grouped(s, s.get("kv_heads"))),
    Key(
        "--kv-channels",
        "head_dim",
        write=lambda s: (
            int(s["head_dim"]) if s.get("head_dim") and s["head_dim"] * s["heads"] != s["hidden"] else ABSENT
        ),
    ),
    Key("--max-position-embeddings", "model_sequence"),
    Key("--vocab-size", "vocab"),
    Key(
        "--swiglu",
        "mlp",
        {"gelu": ABSENT, "swiglu": True, "gelu_new": ABSENT, "relu2": ABSENT, "relu": ABSENT, "geglu": ABSENT},
    ),
    Key(
        "--squared-relu",
        "mlp",
        {"gelu": ABSENT, "swiglu": ABSENT, "gelu_new": ABSENT, "relu2": True, "relu": ABSENT, "geglu": ABSENT},
    ),
    Key("--normalization", "norm", {"ln": "LayerNorm", "rms": "RMSNorm"}, default="LayerNorm"),
    Key(
        "--position-embedding-type",
        "pos",
        {"learned": "learned_absolute", "rope": OneOf("rope", "yarn")},
        default="learned_absolute",
    ),
    Key("--rotary-base", "rope_base", write=lambda s: int(s["rope_base"]) if s.get("pos") == "rope" else ABSENT),
    Key("--untie-embeddings-and-output-weights", "untied", FLAG),
    Key("--disable-bias-linear", "linear_bias", {True: ABSENT, False: True}),
    Key(
        "--add-qkv-bias",
        "qkv_bias",
        write=lambda s: True if s.get("qkv_bias") and not s.get("linear_bias") else ABSENT,
        read=lambda value, keys: {"qkv_bias": True},
    ),
    Key("--qk-layernorm", "qk_norm", FLAG),
    Key("--num-experts", "experts", write=lambda s: s.get("experts") or ABSENT),
    Key("--moe-router-topk", "top_k", write=lambda s: s["top_k"] if s.get("experts") else ABSENT),
    Key("--moe-ffn-hidden-size", "moe_ffn", write=lambda s: s["moe_ffn"] if s.get("experts") else ABSENT),
    Key("--moe-expert-capacity-factor", "expert_capacity"),
    Key("--moe-router-bias-update-rate", "expert_bias_rate"),
    Key("--attention-dropout", "attention_dropout", default=0.1, always=True),
    Key("--hidden-dropout", "dropout", default=0.1, always=True),
)
PARALLEL_KEYS = (
    Key("--tensor-model-parallel-size", "tp", default=1, always=True),
    Key("--pipeline-model-parallel-size", "pp", default=1, always=True),
    Key(
        "--num-virtual-stages-per-pipeline-rank",
        "virtual_stages",
        write=lambda s: s["virtual_stages"] if s["virtual_stages"] > 1 and _layout(s) is ABSENT else ABSENT,
    ),
    read_only("--num-layers-per-virtual-pipeline-stage", "virtual_stages", _virtual_stages),
    Key("--pipeline-model-parallel-layout", "layers_per_stage", write=_layout, read=_read_layout),
    read_only("--decoder-first-pipeline-num-layers", "layers_per_stage", _first_stage),
    read_only("--decoder-last-pipeline-num-layers", "layers_per_stage", _first_stage),
    Key("--context-parallel-size", "cp", default=1),
    Key("--cp-comm-type", "context", write=_context_type, read=_read_context_type),
    write_only(
        "--hierarchical-context-parallel-sizes",
        "ulysses",
        lambda s: (s["ulysses"], s["cp"] // s["ulysses"]) if s["ulysses"] else ABSENT,
    ),
    Key("--expert-model-parallel-size", "ep", default=1),
    Key(
        "--expert-tensor-parallel-size",
        "expert_tp",
        write=lambda s: s["expert_tp"] if s["ep"] > 1 and s["tp"] > 1 else ABSENT,
    ),
    Key("--sequence-parallel", "sequence_parallel", FLAG),
    Key("--use-distributed-optimizer", "zero", {0: ABSENT, 1: True, 2: OneOf(True, ABSENT), 3: OneOf(True, ABSENT)}),
    Key("--use-megatron-fsdp", "zero", {0: ABSENT, 1: ABSENT, 3: True, 2: True}, also=("--use-custom-fsdp",)),
    Key(
        "--data-parallel-sharding-strategy",
        "zero",
        {0: ABSENT, 1: ABSENT, 3: OneOf("optim_grads_params", ABSENT), 2: "optim_grads"},
    ),
    Key(
        "--num-distributed-optimizer-instances",
        "dp_replicate",
        write=lambda s: s["dp_replicate"] if s["zero"] and s["dp_replicate"] > 1 else ABSENT,
    ),
    Key("--overlap-grad-reduce", "zero", dict.fromkeys((0, 1, 2, 3), OneOf(True, ABSENT))),
    Key("--overlap-param-gather", "zero", {0: ABSENT} | dict.fromkeys((1, 2, 3), OneOf(True, ABSENT))),
    Key("--use-tp-pp-dp-mapping", "axes", {MESH_AXES: ABSENT, DP_FIRST_AXES: True}),
    Key(
        "--recompute-granularity",
        "recompute",
        {"none": ABSENT, "full": "full", "sac": "selective", "attn": "selective"},
    ),
    Key(
        "--recompute-modules",
        "recompute",
        write=lambda s: {"attn": "core_attn", "sac": ("layernorm", "mlp")}.get(s["recompute"], ABSENT),
        read=_recompute_modules,
    ),
    write_only(
        "--recompute-method",
        "recompute_layers",
        lambda s: ABSENT if s["recompute"] != "full" else "block" if s["recompute_layers"] else "uniform",
    ),
    Key(
        "--recompute-num-layers",
        "recompute_layers",
        write=lambda s: ABSENT if s["recompute"] != "full" else s["recompute_layers"] or 1,
        read=_recompute_layers,
    ),
    read_only("--recompute-activations", "recompute", lambda value, keys: {"recompute": "attn"}),
    Key("--optimizer-cpu-offload", "offload", {(): ABSENT, ("optimizer",): True}),
    Key(
        "--optimizer-offload-fraction",
        "offload_share",
        write=lambda s: s["offload_share"] / 100 if s["offload"] else ABSENT,
        read=lambda value, keys: {"offload_share": round(value * 100)} if "--optimizer-cpu-offload" in keys else {},
    ),
    Key(
        "--use-precision-aware-optimizer",
        "offload",
        {(): OneOf(ABSENT, True), ("optimizer",): OneOf(True, ABSENT)},
    ),
    read_only("--use-torch-fsdp2", "zero", _torch_fsdp2),
)
TRAINING_KEYS = (
    Key("--micro-batch-size", "micro_batch", default=1, always=True),
    Key("--global-batch-size", "batch"),
    Key("--seq-length", "sequence"),
    Key("--train-iters", "steps"),
    Key("--lr", "lr"),
    Key("--min-lr", "min_lr", default=0.0),
    Key(
        "--lr-decay-style",
        "decay",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "warmup-stable-decay": "WSD"},
        default="linear",
        always=True,
    ),
    write_only("--lr-wsd-decay-style", "decay", lambda s: "linear" if s["decay"] == "warmup-stable-decay" else ABSENT),
    write_only(
        "--lr-wsd-decay-iters",
        "cooldown",
        lambda s: round(s["cooldown"] * s["steps"]) if s["decay"] == "warmup-stable-decay" else ABSENT,
    ),
    read_only("--lr-decay-iters", "steps", read_nothing, also=("--lr-decay-samples",)),
    read_only("--train-samples", "steps", read_nothing),
    Key("--lr-warmup-iters", "warmup", default=0),
    read_only("--lr-warmup-fraction", "warmup", read_nothing),
    read_only("--lr-warmup-samples", "warmup", read_nothing),
    Key("--optimizer", "optimizer", {"adamw": OneOf(ABSENT, "adam"), "sgd-momentum": "sgd", "muon": "muon"}),
    Key("--sgd-momentum", "momentum", write=lambda s: s["momentum"] if s["optimizer"] == "sgd-momentum" else ABSENT),
    Key("--adam-beta1", "beta1", default=0.9),
    Key("--adam-beta2", "beta2", default=0.999),
    Key("--adam-eps", "eps", default=1e-8),
    Key("--weight-decay", "weight_decay", default=0.01),
    Key("--clip-grad", "clip", write=lambda s: s["clip"] or 0.0, read=lambda value, keys: {"clip": value or None}),
    Key("--bf16", "precision", {"fp32": ABSENT, "bf16": True, "fp8": True, "fp16": ABSENT}),
    Key("--fp16", "precision", {"fp32": ABSENT, "bf16": ABSENT, "fp8": ABSENT, "fp16": True}),
    Key(
        "--fp8-format",
        "precision",
        {"fp32": ABSENT, "bf16": ABSENT, "fp8": OneOf("hybrid", "e4m3"), "fp16": ABSENT},
    ),
    Key("--grad-reduce-in-bf16", "reduce", {"fp32": ABSENT, "bf16": True, "fp16": ABSENT}),
    write_only(
        "--accumulate-allreduce-grads-in-fp32",
        "reduce",
        lambda s: True if s["reduce"] == "fp32" and s["precision"] == "fp16" else ABSENT,
    ),
    read_only("--calculate-per-token-loss", "loss", read_nothing),
    Key("--seed", "seed", default=1234),
)


def _grouped(settings: Settings, value: Any) -> Any:
    """Returns `value` if several query heads share keys and values, else ABSENT."""
    heads, groups = settings.get("heads"), settings.get("kv_heads")
    return value if heads and groups and groups < heads else ABSENT


DEGREES = dict.fromkeys(("dp_shard", "tp", "sequence_parallel", "pp", "cp", "ep", "micro_batch"), ANY) | {
    "dp_replicate": ANY,
    "schedule": ("1f1b", "interleaved"),
    "virtual_stages": ANY,
    "layers_per_stage": ANY,
    "context": ANY,
    "ulysses": ANY,
    "axes": (MESH_AXES, DP_FIRST_AXES),
    "recompute": tuple(Recompute),
}
LIMITS = (
    PlanSpaceLimit(
        "the distributed optimizer",
        {
            **DEGREES,
            "zero": (1, 0),
            "recompute_layers": ANY,
            "offload": ((), (Offload.optimizer,)),
            "offload_share": ANY,
        },
        lambda plan: (
            ""
            if plan.recompute_layers == 0 or plan.recompute == Recompute.full
            else Message("--recompute-num-layers limits full recompute only")
        ),
    ),
    PlanSpaceLimit("Megatron-FSDP", {**DEGREES, "zero": (3, 2)}),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns the launch script."""
    lines = ["DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer)  # replace by your data", ""]
    groups = {"MODEL_ARGS": MODEL_KEYS, "PARALLEL_ARGS": PARALLEL_KEYS, "TRAINING_ARGS": TRAINING_KEYS}
    for name, table in groups.items():
        chosen = {key.name: keys[key.name] for key in table if key.name in keys}
        lines += [f"{name}=(", *(f"    {word}" for word in argument_words(chosen)), ")", ""]
    lines += [
        torchrun_line(settings, "pretrain_gpt.py \\"),
        "    ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DATA_ARGS[@]}",
    ]
    return {"launch.sh": "\n".join(lines) + "\n"}


MEGATRON = System(
    name="megatron",
    title="Megatron-LM",
    repository="NVIDIA/Megatron-LM",
    version="core 0.19",
    keys=MODEL_KEYS + PARALLEL_KEYS + TRAINING_KEYS,
    limits=LIMITS,
    write=write,
    framework="Megatron-Core",
    needs_sizes=True,
    workload={
        "precision": ("bf16", "fp8", "fp16", "fp32"),
        "optimizer": ("adamw", "sgd-momentum", "muon"),
        "decayed": ("matrices",),
        "mlp": ("swiglu", "gelu", "gelu_new", "relu2"),
        "pos": ("rope", "learned"),
    },
    numerics=(
        NumericsNote(
            Message(
                "without --calculate-per-token-loss, the loss of each micro-batch is divided by its own number of "
                "labels, and the means are averaged over micro-batches and replicas; it differs from the mean over all "
                "labels if micro-batches have unequal numbers of labels"
            ),
            "megatron/core/pipeline_parallel/schedules.py:339",
        ),
        NumericsNote(
            Message(
                "gradients of bf16 weights are accumulated and reduced in float32, unless --grad-reduce-in-bf16 is set"
            ),
            "megatron/training/arguments.py:1213",
        ),
        NumericsNote(
            Message("attention and hidden dropout are 0.1 unless the options set them to 0"),
            "megatron/core/transformer/transformer_config.py:188",
        ),
    ),
    renamed={
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--batch-size": "--micro-batch-size",
        "--warmup": "--lr-warmup-fraction",
        "--checkpoint-activations": "--recompute-granularity full",
    },
    defaults={"clip": 1.0, "decayed": "matrices"},
    adjust=_adjust,
)
