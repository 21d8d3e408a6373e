"""The arguments of `transformers.TrainingArguments` and of the example scripts of Hugging Face, as a table. The
systems whose scripts take them share it: DeepSpeed, accelerate and transformers.

Source: src/transformers/training_args.py of huggingface/transformers, version 5.23 (older names are read too).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.settings import Settings
from meshwright.interop.system import ABSENT, Key, NumericsNote, read_nothing, remark, remark_value

FSDP1_STAGES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}
"""The sharding strategies of version 1 of FSDP, with the ZeRO stages."""
DECAYS = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant_with_warmup",
    "warmup-stable-decay": "warmup_stable_decay",
}
"""Our schedules of the learning rate, with the names of transformers. A cosine that does not end at 0 is
cosine_with_min_lr."""


READ_DECAYS = {theirs: ours for ours, theirs in DECAYS.items()} | {
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
}
TRAINER_DEFAULTS: Settings = {"decay": "linear", "final_lr": 0.0, "lr": 5e-5, "warmup": 0, "clip": 1.0} | {
    "optimizer": "adamw",
    "decayed": "matrices",
}
"""The training settings of the Trainer that no option states (src/transformers/training_args.py:787 to 866). Weight
decay leaves out biases and norms (src/transformers/trainer.py:1408)."""


def _read_decay(value: Any, keys: Mapping[str, Any]) -> Settings:
    if value not in READ_DECAYS:
        return {}
    return {"decay": READ_DECAYS[value], "final_lr": 0.0}


def _write_decay(settings: Settings) -> Any:
    if settings["decay"] == "cosine" and settings["final_lr"] > 0:
        return "cosine_with_min_lr"
    return DECAYS[settings["decay"]]


def _decay_options(settings: Settings) -> dict[str, Any]:
    """Returns the fields of lr_scheduler_kwargs."""
    if settings["decay"] == "cosine" and settings["final_lr"] > 0:
        return {"min_lr_rate": settings["final_lr"]}
    if settings["decay"] == "warmup-stable-decay":
        decay = round(settings["cooldown"] * settings["steps"])
        return {"num_decay_steps": decay, "min_lr_ratio": settings["final_lr"], "decay_type": "linear"}
    return {}


def option(keys: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Returns the value of an option of the Trainer, from a JSON file or a command line."""
    return keys.get(name, keys.get(f"--{name}", default))


def adjust_schedule(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Sets what depends on several options of the schedule, and reports what is lost: the Trainer's `constant` has no
    warmup, and its warmup_stable_decay falls as a cosine unless decay_type says otherwise
    (src/transformers/optimization.py:508)."""
    kind, kwargs = option(keys, "lr_scheduler_type"), _schedule_options(keys)
    if kind is not None and kind not in READ_DECAYS:
        remark_value(settings, "lr_scheduler_type", kind)
    _report_optimizer(settings, keys)
    if kind == "constant":
        settings["warmup"] = 0
    report_warmup(settings, keys)
    if settings.get("decay") == "warmup-stable-decay" and kwargs.get("decay_type") != "linear":
        remark_value(settings, "lr_scheduler_kwargs.decay_type", kwargs.get("decay_type", "cosine"))
    if "num_decay_steps" in kwargs and settings.get("steps"):
        settings["cooldown"] = min(float(kwargs["num_decay_steps"]) / settings["steps"], 1.0)
    if "min_lr" in kwargs:
        lr = settings.get("lr", TRAINER_DEFAULTS["lr"])
        settings["final_lr"] = min(float(kwargs["min_lr"]) / lr, 1.0) if lr else 0.0


ADAMW_NAMES = ("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused")
"""The values of `optim` that are AdamW as torch computes it."""
OPTIMIZER_REMEDIES = {
    "adafactor": Message(
        "set workload.optimizer.name adafactor, which is torch.optim.Adafactor and multiplies lr by the size of weights"
    ),
    "sgd": Message("set workload.optimizer.name sgd"),
    "8bit": Message("set workload.optimizer.state 8bit"),
}


def _report_optimizer(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Reports an optimizer other than AdamW, unless a configuration of DeepSpeed states the optimizer."""
    kind = "adafactor" if option(keys, "adafactor") is True else option(keys, "optim")
    if kind is None or kind in ADAMW_NAMES or "optimizer.type" in keys:
        return
    found = next((remedy for name, remedy in OPTIMIZER_REMEDIES.items() if name in str(kind)), None)
    other = Message("set workload.optimizer.name to package.module:function, or train with adamw as the job says")
    remark_value(settings, "optim", kind, found or other)


def _schedule_options(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of lr_scheduler_kwargs, from the keys of a JSON file or the JSON of a command line, whose
    quotation marks the shell has removed."""
    start = "lr_scheduler_kwargs."
    found = {name.removeprefix(start): value for name, value in keys.items() if name.startswith(start)}
    text = keys.get("--lr_scheduler_kwargs", "")
    words = " ".join(map(str, text)) if isinstance(text, tuple) else str(text)
    return found | dict(re.findall(r"(\w+): ?([\w.+-]+)", words.replace('"', "").replace("'", "")))


def _read_decay_options(text: Any, keys: Mapping[str, Any]) -> Settings:
    found = _schedule_options(keys)
    rate = found.get("min_lr_rate", found.get("min_lr_ratio"))
    return {} if rate is None else {"final_lr": float(rate)}


def _decay_keys(prefix: str) -> tuple[Key, ...]:
    """Returns the rows of lr_scheduler_kwargs: one option with JSON on a command line, one key each in a JSON file."""
    if prefix:
        return (
            Key(
                f"{prefix}lr_scheduler_kwargs",
                "final_lr",
                write=lambda s: json.dumps(_decay_options(s)) if _decay_options(s) else ABSENT,
                read=_read_decay_options,
            ),
        )
    names = ("min_lr_rate", "min_lr_ratio", "min_lr", "num_decay_steps", "decay_type")
    return tuple(_decay_option_key(name) for name in names)


def _decay_option_key(name: str) -> Key:
    return Key(
        f"lr_scheduler_kwargs.{name}",
        "final_lr",
        write=lambda s: _decay_options(s).get(name, ABSENT),
        read=lambda v, k: {"final_lr": v} if name in ("min_lr_rate", "min_lr_ratio") else {},
    )


def set_autocast_reduction(settings: Settings) -> None:
    """Sets the precision in which DDP reduces gradients. accelerate runs the forward pass under autocast, so weights
    and gradients are float32 (src/accelerate/accelerator.py:1820)."""
    if settings.get("precision") in ("bf16", "fp16"):
        settings["reduce"] = "fp32"


def _warmup_keys(keys: Mapping[str, Any]) -> dict[str, float]:
    """Returns the stated numbers of warmup steps above 0, `warmup_ratio` last: in releases 4.x, `warmup_steps` above 0
    replaces it (`get_warmup_steps` of src/transformers/training_args.py). Version 5.23 has no `warmup_ratio`."""
    names = ("warmup_steps", "num_warmup_steps", "warmup_ratio")
    stated = {name: option(keys, name) for name in names}
    return {name: value for name, value in stated.items() if isinstance(value, int | float) and value > 0}


def _read_warmup(value: Any, keys: Mapping[str, Any]) -> Settings:
    """A number below 1 is a fraction of the steps."""
    for given in _warmup_keys(keys).values():
        if given >= 1:
            return {"warmup": int(given)}
        steps = option(keys, "max_steps", option(keys, "max_train_steps"))
        return {"warmup": math.ceil(given * steps)} if isinstance(steps, int) and steps > 0 else {}
    return {"warmup": 0}


def report_warmup(settings: Settings, keys: Mapping[str, Any]) -> None:
    """Reports a warmup that is a fraction of an unknown number of steps."""
    name, value = next(iter(_warmup_keys(keys).items()), ("", 1))
    if value < 1 and "warmup" not in settings:
        remark(
            settings,
            Message(
                "{name}={value} needs the number of steps, which no file states: the job has warmup 0; add max_steps, "
                "or set optimizer.warmup",
                name=name,
                value=value,
            ),
        )


def hf_keys(prefix: str) -> tuple[Key, ...]:
    """Returns the table with `prefix` before each name: `--` for a command line, an empty text for a JSON file."""

    def key(name: str, setting: str, values: Any = None, also: tuple[str, ...] = (), **options: Any) -> Key:
        return Key(prefix + name, setting, values, also=tuple(prefix + other for other in also), **options)

    no = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), ABSENT)
    return (
        key("model_name_or_path", "model", also=("model_name", "model_id")),
        key("per_device_train_batch_size", "micro_batch", also=("train_micro_batch_size_per_gpu",)),
        key("gradient_accumulation_steps", "accumulation", default=1, always=True),
        key(
            "max_steps",
            "steps",
            also=("max_train_steps",),
            read=lambda v, k: {"steps": v} if v > 0 else {},
            write=lambda s: s["steps"],
        ),
        key("block_size", "sequence", also=("max_seq_length", "max_seq_len", "model_max_length", "max_length")),
        key("learning_rate", "lr"),
        key("weight_decay", "weight_decay", default=0.0),
        key("adam_beta1", "beta1", default=0.9),
        key("adam_beta2", "beta2", default=0.999),
        key("adam_epsilon", "eps", default=1e-8),
        key("max_grad_norm", "clip", write=lambda s: s["clip"] or 0.0, read=lambda v, k: {"clip": v or None}),
        key("lr_scheduler_type", "decay", write=_write_decay, read=_read_decay),
        *_decay_keys(prefix),
        key(
            "warmup_steps",
            "warmup",
            also=("num_warmup_steps", "warmup_ratio"),
            read=_read_warmup,
            write=lambda s: s["warmup"],
        ),
        key("optim", "optimizer", read=read_nothing, write=lambda s: ABSENT, also=("adafactor",)),
        key("seed", "seed", default=42),
        key("bf16", "precision", no | {"bf16": True}),
        key("fp16", "precision", no | {"fp16": True}),
        key("tf32", "precision", no | {"tf32": True}),
        key("activation_checkpointing", "recompute", {"none": ABSENT, "full": True}, also=("gradient_checkpointing",)),
        key("torch_compile", "compile", {False: ABSENT, True: True}),
    )


TRAINER_NUMERICS = (
    NumericsNote(
        Message(
            "the Trainer divides the loss by the number of labels of the whole batch only if "
            "average_tokens_across_devices is set and the model takes num_items_in_batch; other losses are means of "
            "means over micro-batches and ranks"
        ),
        "src/transformers/trainer.py:1909",
        "huggingface/transformers",
    ),
    NumericsNote(
        Message("with bf16 or fp16, FSDP also reduces gradients in this dtype, not in float32"),
        "src/accelerate/utils/dataclasses.py:2137",
        "huggingface/accelerate",
    ),
    NumericsNote(
        Message("weight decay applies to all parameters except biases and norms, as here"),
        "src/transformers/trainer.py:1408",
        "huggingface/transformers",
    ),
)
"""Where the Trainer of transformers differs."""
