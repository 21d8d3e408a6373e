"""The arguments of `transformers.TrainingArguments` and of the example scripts of Hugging Face, as a table. The
systems whose scripts take them share it: DeepSpeed, accelerate and transformers.

Source: src/transformers/training_args.py of huggingface/transformers, version 5.23 (older names are read too).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.settings import Settings
from meshwright.interop.system import ABSENT, Key, NumericsNote

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


def _read_decay(value: Any, keys: Mapping[str, Any]) -> Settings:
    ours = {theirs: ours for ours, theirs in DECAYS.items()} | {
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "warmup_stable_decay": "warmup-stable-decay",
    }
    if value not in ours:
        return {}
    return {"decay": ours[value], **({"final_lr": 0.0} if value in ("linear", "cosine") else {})}


def _write_decay(settings: Settings) -> Any:
    if settings["decay"] == "cosine" and settings["final_lr"] > 0:
        return "cosine_with_min_lr"
    return DECAYS[settings["decay"]]


def _decay_options(settings: Settings) -> dict[str, float]:
    """Returns the fields of lr_scheduler_kwargs."""
    if settings["decay"] == "cosine" and settings["final_lr"] > 0:
        return {"min_lr_rate": settings["final_lr"]}
    if settings["decay"] == "warmup-stable-decay":
        decay = round(settings["cooldown"] * settings["steps"])
        return {"num_decay_steps": decay, "min_lr_ratio": settings["final_lr"]}
    return {}


def _read_decay_options(text: Any, keys: Mapping[str, Any]) -> Settings:
    """Reads the JSON of --lr_scheduler_kwargs, whose quotation marks the shell has removed."""
    words = " ".join(map(str, text)) if isinstance(text, tuple) else str(text)
    found = re.search(r"min_lr_(?:rate|ratio): ?([\d.e-]+)", words)
    return {"final_lr": float(found[1])} if found else {}


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
    names = ("min_lr_rate", "min_lr_ratio", "num_decay_steps")
    return tuple(_decay_option_key(name) for name in names)


def _decay_option_key(name: str) -> Key:
    return Key(
        f"lr_scheduler_kwargs.{name}",
        "final_lr",
        write=lambda s: _decay_options(s).get(name, ABSENT),
        read=lambda v, k: {} if name == "num_decay_steps" else {"final_lr": v},
    )


def _read_warmup(value: Any, keys: Mapping[str, Any]) -> Settings:
    """A number below 1 is a fraction of the steps."""
    steps = keys.get("--max_steps", keys.get("max_steps"))
    if isinstance(value, float) and value < 1:
        return {"warmup": round(value * steps)} if isinstance(steps, int) and steps > 0 else {}
    return {"warmup": int(value)}


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
