"""nanotron: the YAML configuration of `run_train.py`, with its launch line.

Sources, at commit 2411b022 of huggingface/nanotron: src/nanotron/config/config.py,
src/nanotron/config/parallelism_config.py, src/nanotron/config/models_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.formats import torchrun_line, write_yaml
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
from meshwright.spec.enums import Recompute


def _adjust(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets the properties that every model of nanotron has, and the accumulation dtype."""
    if "hidden" in settings:
        settings |= {"norm": "rms", "pos": "rope", "mlp": "swiglu", "linear_bias": False}
        settings["qkv_bias"] = bool(keys.get("model.model_config.is_qwen2_config"))
    if settings.get("precision") == "bf16":
        settings["reduce"] = "fp32" if keys.get("optimizer.accumulate_grad_in_fp32", True) else "bf16"
    steps, warmup = keys.get("tokens.train_steps"), settings.get("warmup", 0)
    start = keys.get("optimizer.learning_rate_scheduler.lr_decay_starting_step")
    if isinstance(start, int) and isinstance(steps, int) and settings.get("decay") == "linear" and start > warmup:
        settings |= {"decay": "warmup-stable-decay", "cooldown": (steps - start) / steps}
    if "min_lr" not in settings:
        settings["final_lr"] = 1.0  # min_decay_lr is the learning rate unless it is set
    for name in (SCHEDULE + "lr_warmup_style", "optimizer.optimizer_factory.name", *MODEL_VALUES):
        if keys.get(name) not in (None, FIXED[name]):
            remark_value(settings, name, keys[name])
    if keys.get(EXCLUDED):
        remark_value(settings, EXCLUDED, keys[EXCLUDED])


def _decay_start(settings: Settings) -> Any:
    if settings["decay"] != "warmup-stable-decay":
        return ABSENT
    return settings["steps"] - round(settings["cooldown"] * settings["steps"])


def _fixed(name: str, value: Any) -> Key:
    return write_only(name, "engine", lambda s: value)


CONFIG, SCHEDULE = "model.model_config.", "optimizer.learning_rate_scheduler."
FIXED: Mapping[str, Any] = {
    "general.project": "meshwright",
    "general.run": "run",
    "checkpoints.checkpoints_path": "checkpoints",
    "checkpoints.checkpoint_interval": 1000,
    CONFIG + "is_llama_config": True,
    CONFIG + "hidden_act": "silu",
    "model.init_method.std": 0.02,
    "optimizer.optimizer_factory.name": "adamW",
    "optimizer.optimizer_factory.torch_adam_is_fused": True,
    SCHEDULE + "lr_warmup_style": "linear",
    "tokens.val_check_interval": -1,
}
"""Keys that nanotron needs and that no setting determines."""
MODEL_VALUES = ("model.init_method.std", CONFIG + "hidden_act")
EXCLUDED = "optimizer.weight_decay_exclude_named_params"
"""Names of parameters without weight decay; all others decay (src/nanotron/helpers.py, the parameter groups)."""
KEYS = (
    *(_fixed(name, value) for name, value in FIXED.items()),
    Key("general.seed", "seed", default=42, always=True),
    Key(CONFIG + "hidden_size", "hidden"),
    Key(CONFIG + "intermediate_size", "ffn"),
    Key(CONFIG + "num_hidden_layers", "model_layers"),
    Key(CONFIG + "num_attention_heads", "heads"),
    Key(CONFIG + "num_key_value_heads", "kv_heads"),
    Key(CONFIG + "max_position_embeddings", "model_sequence"),
    Key(CONFIG + "vocab_size", "vocab"),
    Key(CONFIG + "tie_word_embeddings", "untied", {True: False, False: True}),
    Key(CONFIG + "rope_theta", "rope_base", default=10000.0),
    Key("model.dtype", "precision", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, default="bfloat16"),
    write_only("optimizer.accumulate_grad_in_fp32", "reduce", lambda s: s["reduce"] == "fp32"),
    Key("optimizer.zero_stage", "zero", default=0, always=True),
    Key("optimizer.weight_decay", "weight_decay"),
    read_only(EXCLUDED, "decayed", read_nothing),
    Key("optimizer.clip_grad", "clip", write=lambda s: s["clip"], read=lambda v, k: {"clip": v}),
    Key("optimizer.optimizer_factory.adam_beta1", "beta1"),
    Key("optimizer.optimizer_factory.adam_beta2", "beta2"),
    Key("optimizer.optimizer_factory.adam_eps", "eps"),
    Key(SCHEDULE + "learning_rate", "lr"),
    Key(SCHEDULE + "lr_warmup_steps", "warmup", default=0, always=True),
    Key(
        SCHEDULE + "lr_decay_style",
        "decay",
        {"linear": "linear", "cosine": "cosine", "warmup-stable-decay": "linear", "constant": "linear"},
        default="linear",
        always=True,
    ),
    write_only(SCHEDULE + "lr_decay_starting_step", "cooldown", _decay_start),
    Key(SCHEDULE + "min_decay_lr", "min_lr"),
    Key("parallelism.dp", "dp"),
    Key("parallelism.tp", "tp"),
    Key("parallelism.pp", "pp"),
    Key("parallelism.pp_engine", "schedule", {"1f1b": "1f1b", "gpipe": "afab"}, default="afab", always=True),
    Key(
        "parallelism.tp_mode",
        "sequence_parallel",
        {False: OneOf(ABSENT, "ALL_REDUCE"), True: "REDUCE_SCATTER"},
    ),
    Key(
        "parallelism.tp_linear_async_communication",
        "sequence_parallel",
        {True: OneOf(True, False, ABSENT), False: OneOf(ABSENT, False, True)},
    ),
    Key("parallelism.expert_parallel_size", "ep", default=1),
    Key("parallelism.context_parallel_size", "cp", default=1),
    Key("parallelism.recompute_layer", "recompute", {"none": OneOf(ABSENT, False), "full": True}),
    Key("tokens.micro_batch_size", "micro_batch"),
    Key("tokens.batch_accumulation_per_replica", "accumulation"),
    Key("tokens.sequence_length", "sequence"),
    Key("tokens.train_steps", "steps"),
)
LIMITS = (
    PlanSpaceLimit(
        "3-D parallelism",
        {
            **dict.fromkeys(("dp_shard", "tp", "pp", "cp", "sequence_parallel", "micro_batch"), ANY),
            "zero": (1, 0),
            "schedule": ("1f1b", "gpipe"),
            "recompute": (Recompute.none, Recompute.full),
        },
    ),
)


def write(keys: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Returns config.yaml and the launch script."""
    tokenizer = {"tokenizer.tokenizer_name_or_path": settings.get("model") or "gpt2"}
    stage = {"name": "train", "start_training_step": 1, "data": {"dataset": None, "seed": settings["seed"]}}
    launch = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {torchrun_line(settings, 'run_train.py --config-file config.yaml')}\n"
    return {"config.yaml": write_yaml({**keys, **tokenizer, "data_stages": (stage,)}), "launch.sh": launch}


NANOTRON = System(
    name="nanotron",
    title="nanotron",
    repository="huggingface/nanotron",
    version="2411b022",
    keys=KEYS,
    limits=LIMITS,
    write=write,
    framework="nanotron",
    needs_sizes=True,
    workload={
        "precision": ("bf16", "fp16", "fp32"),
        "optimizer": ("adamw",),
        "mlp": ("swiglu",),
        "norm": ("rms",),
        "pos": ("rope",),
        "experts": (0,),
        "decay": ("linear", "cosine", "warmup-stable-decay"),
        "decayed": ("all",),
    },
    numerics=(
        NumericsNote(
            Message(
                "the loss of each micro-batch is the mean over its labels, divided by the number of micro-batches, and "
                "gradients are averaged over replicas: a mean of means"
            ),
            "src/nanotron/parallel/pipeline_parallel/engine.py:55",
        ),
        NumericsNote(
            Message("with accumulate_grad_in_fp32, gradients are accumulated and reduced in float32"),
            "src/nanotron/optim/gradient_accumulator.py:58",
        ),
    ),
    defaults={"clip": None, "decayed": "all", "optimizer": "adamw"},
    adjust=_adjust,
)
