"""A folder of files that come together, for other programs to read: all under temporary names, then renamed in order,
so that what stands last says
that the rest is there. Where it cannot be written whole nothing of it stays.

Low-rank adapters of a checkpoint: added to the weights that they stand beside, or alone in the form that peft reads.

Rule: W + (alpha / rank) B A, in the saved type, one layer at a time; layers that keep their weight as (in, out) get the
transpose.
Source: huggingface/peft, `adapter_config.json` and `adapter_model.safetensors` (keys without the adapter's name, behind
'base_model.model.').

Out to Hugging Face's form: a folder of safetensors files with the full tensors under the model's own names. In is
weights.py.

`export` has one tensor in memory at a time; above 5 GB it writes several files and an index, as `from_pretrained` reads
them.
`import_weights` makes such a folder a checkpoint.
Source: huggingface/transformers, `save_pretrained` (max_shard_size, `model.safetensors.index.json`).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from meshwright.checkpoint.hf_weights import BUFFER_PREFIX, INDEX_FILE, WEIGHT_PREFIX, WEIGHTS_FILE, HfWeights
from meshwright.checkpoint.load import read_full_tensor
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, PendingTensor, dtype_name, write_shard
from meshwright.checkpoint.save import save_checkpoint
from meshwright.checkpoint.verify import CheckpointReader
from meshwright.core import storage
from meshwright.core.errors import InputError, MeshwrightError, did_you_mean
from meshwright.core.units import show_bytes
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.workload import LoraConfig


def write_files_atomically(folder: Path, files: Mapping[str, bytes | Sequence[PendingTensor]]) -> list[Path]:
    """`files`, by name what each holds, in `folder`; their paths."""
    made = not storage.path_exists(folder)
    storage.make_folder(folder)
    done: list[Path] = []
    try:
        needs = sum(
            len(content) if isinstance(content, bytes) else sum(item.size for item in content)
            for content in files.values()
        )
        if needs > storage.free_bytes(folder):
            raise OSError(
                errno.ENOSPC, f"the files need {show_bytes(needs)}, {show_bytes(storage.free_bytes(folder))} are free"
            )
        for name, content in files.items():
            done.append(folder / f".{name}.tmp")
            storage.remove(done[-1])
            if isinstance(content, bytes):
                storage.write_file(done[-1], [content])
            else:
                write_shard(done[-1], content, {"format": "pt"})
        for index, name in enumerate(files):
            storage.rename(done[index], folder / name)
            done[index] = folder / name
        storage.sync_folder(folder)
    except BaseException as error:
        for path in done:
            storage.remove_if_possible(path)
        if made:
            storage.remove_if_possible(folder)
        if isinstance(error, OSError):
            kind = MeshwrightError if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
            raise kind(f"folder {str(folder)!r}: {error.strerror}; nothing is exported") from None
        raise
    return done


LORA_BASE_INFIX, LORA_A_SUFFIX, LORA_B_SUFFIX = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
FAN_IN_FAN_OUT_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families whose layers keep their weight as (in, out)."""
ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def is_lora_weight(name: str) -> bool:
    """Whether a checkpoint's tensor is a weight of an adapter."""
    return name.startswith(WEIGHT_PREFIX) and name.endswith((LORA_A_SUFFIX, LORA_B_SUFFIX))


class MergedLora:
    """Full weights of a checkpoint with their adapters added."""

    def __init__(self, reader: CheckpointReader, lora: LoraConfig, config: Mapping[str, Any] | None) -> None:
        self.reader, self.scale = reader, lora.alpha / lora.rank
        self.turned = (config or {}).get("model_type") in FAN_IN_FAN_OUT_FAMILIES

    def full(self, name: str) -> torch.Tensor:
        weight = read_full_tensor(self.reader, name)
        layer = name.removesuffix(f"{LORA_BASE_INFIX}weight")
        if layer == name or layer + LORA_A_SUFFIX not in self.reader.manifest.tensors:
            return weight
        change = self.scale * (
            read_full_tensor(self.reader, layer + LORA_B_SUFFIX) @ read_full_tensor(self.reader, layer + LORA_A_SUFFIX)
        )
        change = change.T if self.turned else change
        if change.shape != weight.shape:
            raise InputError(
                f"{self.reader.path}: the adapter of {name} is {list(change.shape)}, its weight {list(weight.shape)}"
            )
        return weight + change.to(weight.dtype)


def export_adapter(path: Path, folder: Path, lora: LoraConfig, base: str, beside: Mapping[str, bytes]) -> list[Path]:
    """The adapters of the checkpoint `path` in `folder`, as `peft.PeftModel.from_pretrained` reads them. `base`: the
    folder of the model."""
    reader = CheckpointReader(path)
    names = sorted(name for name in reader.manifest.tensors if is_lora_weight(name))
    if not names:
        raise InputError(f"{path}: holds no adapters")
    if (folder / ADAPTER_WEIGHTS_FILE).exists():
        raise InputError(f"folder {str(folder)!r} already holds an adapter; name another, or remove it first")
    items = []
    for name in names:
        entry = reader.manifest.tensors[name]
        shown = "base_model.model." + name.removeprefix(WEIGHT_PREFIX).replace(".default.weight", ".weight")
        items.append(
            PendingTensor(
                shown,
                entry.dtype,
                entry.shape,
                entry.numel * DTYPE_BY_NAME[entry.dtype].itemsize,
                partial(read_full_tensor, reader, name),
            )
        )
    layers = sorted(
        {
            name.removeprefix(WEIGHT_PREFIX).removesuffix(LORA_A_SUFFIX).rpartition(".")[2]
            for name in names
            if name.endswith(LORA_A_SUFFIX)
        }
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": layers, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    return write_files_atomically(
        folder, {**beside, ADAPTER_CONFIG_FILE: json.dumps(config, indent=2).encode(), ADAPTER_WEIGHTS_FILE: items}
    )


MAX_SHARD_BYTES = 5 * 10**9


def export_weights(
    path: Path | str,
    folder: Path | str,
    config: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    turned: tuple[str, ...] = (),
    beside: Mapping[str, bytes] = MappingProxyType({}),
    lora: LoraConfig | None = None,
    largest: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes the full weights of the checkpoint `path` into `folder` and returns the files.

    `dtype` rounds floating-point weights to another type; matrices whose name ends in one of `turned` are transposed.
    `beside`: other
    files of the folder, such as those of companions.py. `lora`: the adapters are added to the weights that they stand
    beside. The config says the type that is written: `from_pretrained` rounds to it.
    """
    folder = Path(folder)
    reader = CheckpointReader(path)
    weights = {
        name: entry
        for name, entry in reader.manifest.tensors.items()
        if name.startswith((WEIGHT_PREFIX, BUFFER_PREFIX))
    }
    if not any(name.startswith(WEIGHT_PREFIX) for name in weights):
        raise InputError(f"{path}: holds no weights of a model")
    if dtype is not None and (dtype not in DTYPE_BY_NAME or not DTYPE_BY_NAME[dtype].is_floating_point):
        raise InputError(
            f"dtype {dtype!r} is not a floating-point type{did_you_mean(dtype, DTYPE_BY_NAME)}; such are float32, bfloat16, float16"
        )
    if folder.exists() and any(folder.glob("model*.safetensors*")):
        raise InputError(f"folder {str(folder)!r} already holds weights; name another, or remove them first")
    items = []
    folded = MergedLora(reader, lora, config) if lora is not None else None
    for name, entry in sorted(weights.items()):
        if is_lora_weight(name) and folded is not None:
            continue
        kind = (
            dtype
            if dtype and name.startswith(WEIGHT_PREFIX) and DTYPE_BY_NAME[entry.dtype].is_floating_point
            else entry.dtype
        )
        shown = name.partition("/")[2].replace(LORA_BASE_INFIX, ".")
        turn = shown.endswith(turned) and len(entry.shape) == 2
        shape = entry.shape[::-1] if turn else entry.shape
        items.append(
            PendingTensor(
                shown,
                kind,
                shape,
                entry.numel * DTYPE_BY_NAME[kind].itemsize,
                partial(_read_full, folded or reader, name, kind, turn),
            )
        )
    texts = dict(beside)
    if config is not None:
        written = dtype or next(
            entry.dtype for name, entry in sorted(weights.items()) if name.startswith(WEIGHT_PREFIX)
        )
        others = {key: value for key, value in config.items() if key != "torch_dtype"}
        texts["config.json"] = json.dumps({**others, "dtype": written}, indent=2).encode()
    return write_files_atomically(folder, _shard_files(items, texts, largest))


def _read_full(source: CheckpointReader | MergedLora, name: str, dtype: str, turn: bool) -> torch.Tensor:
    tensor = (source.full(name) if isinstance(source, MergedLora) else read_full_tensor(source, name)).to(
        DTYPE_BY_NAME[dtype]
    )
    return tensor.T if turn else tensor


def _shard_files(
    items: list[PendingTensor], texts: dict[str, bytes], largest: int
) -> dict[str, bytes | list[PendingTensor]]:
    """By name what each file holds, the index last: a folder cut short is no model."""
    groups: list[list[PendingTensor]] = [[]]
    room = largest
    for item in items:
        if groups[-1] and item.size > room:
            groups.append([])
            room = largest
        groups[-1].append(item)
        room -= item.size
    one = len(groups) == 1
    names = [
        WEIGHTS_FILE if one else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        for index in range(1, len(groups) + 1)
    ]
    total = sum(item.size for item in items)
    if not one:
        where = {item.key: name for name, group in zip(names, groups, strict=True) for item in group}
        texts[INDEX_FILE] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()
    return {**dict(zip(names, groups, strict=True)), **texts}


def import_weights(source: Path | str, folder: Path | str) -> Path:
    """The weights of `source` as the checkpoint of step 0 in `folder`."""
    weights = HfWeights(source)
    pieces = []
    for key in weights.entries:
        tensor = weights.whole(key)
        assert tensor is not None
        pieces.append(
            (
                ShardMetadata(
                    WEIGHT_PREFIX + key, tuple(tensor.shape), dtype_name(tensor.dtype), None, (), 0, tensor.numel()
                ),
                tensor.reshape(-1),
            )
        )
    return save_checkpoint(folder, 0, pieces, {"imported": str(source)})
