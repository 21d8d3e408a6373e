"""Low-rank adapters of a checkpoint: added to the weights that they stand beside, or alone in the form that peft reads.

Rule: W + (alpha / rank) B A, in the saved type, one layer at a time; layers that keep their weight as (in, out) get the transpose.
Source: huggingface/peft, `adapter_config.json` and `adapter_model.safetensors` (keys without the adapter's name, behind 'base_model.model.').
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import InputError
from meshwright.checkpoint.exported import write_folder
from meshwright.checkpoint.load import full
from meshwright.checkpoint.shard import DTYPES, Item
from meshwright.checkpoint.verify import Reader
from meshwright.checkpoint.weights import PREFIX
from meshwright.spec.workload import Lora

BASE, A, B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
TURNED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families whose layers keep their weight as (in, out)."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def is_adapter(name: str) -> bool:
    """Whether a checkpoint's tensor is a weight of an adapter."""
    return name.startswith(PREFIX) and name.endswith((A, B))


class Folded:
    """Full weights of a checkpoint with their adapters added."""

    def __init__(self, reader: Reader, lora: Lora, config: Mapping[str, Any] | None) -> None:
        self.reader, self.scale = reader, lora.alpha / lora.rank
        self.turned = (config or {}).get("model_type") in TURNED

    def full(self, name: str) -> torch.Tensor:
        weight = full(self.reader, name)
        layer = name.removesuffix(f"{BASE}weight")
        if layer == name or layer + A not in self.reader.manifest.tensors:
            return weight
        change = self.scale * (full(self.reader, layer + B) @ full(self.reader, layer + A))
        change = change.T if self.turned else change
        if change.shape != weight.shape:
            raise InputError(f"{self.reader.path}: the adapter of {name} is {list(change.shape)}, its weight {list(weight.shape)}")
        return weight + change.to(weight.dtype)


def export_adapter(path: Path, folder: Path, lora: Lora, base: str, beside: Mapping[str, bytes]) -> list[Path]:
    """The adapters of the checkpoint `path` in `folder`, as `peft.PeftModel.from_pretrained` reads them. `base`: the folder of the model."""
    reader = Reader(path)
    names = sorted(name for name in reader.manifest.tensors if is_adapter(name))
    if not names:
        raise InputError(f"{path}: holds no adapters")
    if (folder / WEIGHTS).exists():
        raise InputError(f"folder {str(folder)!r} already holds an adapter; name another, or remove it first")
    items = []
    for name in names:
        entry = reader.manifest.tensors[name]
        shown = "base_model.model." + name.removeprefix(PREFIX).replace(".default.weight", ".weight")
        items.append(Item(shown, entry.dtype, entry.shape, entry.numel * DTYPES[entry.dtype].itemsize, partial(full, reader, name)))
    layers = sorted({name.removeprefix(PREFIX).removesuffix(A).rpartition(".")[2] for name in names if name.endswith(A)})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": layers, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    return write_folder(folder, {**beside, CONFIG: json.dumps(config, indent=2).encode(), WEIGHTS: items})
