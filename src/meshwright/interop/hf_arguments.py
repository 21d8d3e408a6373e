"""The arguments of `transformers.TrainingArguments` and of the example scripts of Hugging Face, as a table. The
systems whose scripts take them share it: DeepSpeed, accelerate and transformers.

Source: src/transformers/training_args.py of huggingface/transformers, version 5.23 (older names are read too).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.settings import Settings
from meshwright.interop.system import ABSENT, Key, NumericsNote

DECAYS = {
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
    "constant": "constant_with_warmup",
    "warmup-stable-decay": "warmup_stable_decay",
}
"""Our schedules of the learning rate, with the names of transformers. cosine and constant are read too."""


def _read_decay(value: Any, keys: Mapping[str, Any]) -> Settings:
    ours = {theirs: ours for ours, theirs in DECAYS.items()} | {"cosine": "cosine", "constant": "constant"}
    return {"decay": ours[value]} if value in ours else {}


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
        key("lr_scheduler_type", "decay", write=lambda s: DECAYS[s["decay"]], read=_read_decay),
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
    ),
    NumericsNote(
        Message("weight decay applies to all parameters except biases and norms, as here"),
        "src/transformers/trainer.py:1408",
    ),
)
"""Where the Trainer of transformers differs."""
