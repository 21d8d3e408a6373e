"""Out to Hugging Face's form: a folder of safetensors files with the full tensors under the model's own names. In is weights.py.

`export` has one tensor in memory at a time; above 5 GB it writes several files and an index, as `from_pretrained` reads them.
`import_weights` makes such a folder a checkpoint.
Source: huggingface/transformers, `save_pretrained` (max_shard_size, `model.safetensors.index.json`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from meshwright.base.errors import InputError, did_you_mean
from meshwright.checkpoint.adapters import BASE, Folded, is_adapter
from meshwright.checkpoint.exported import write_folder
from meshwright.checkpoint.load import full
from meshwright.checkpoint.save import save
from meshwright.checkpoint.shard import DTYPES, Item, dtype_name
from meshwright.checkpoint.verify import Reader
from meshwright.checkpoint.weights import BUFFER, INDEX, PREFIX, WEIGHTS, Weights
from meshwright.spec.piece import Piece
from meshwright.spec.workload import Lora

LARGEST_FILE = 5 * 10**9


def export(
    path: Path | str,
    folder: Path | str,
    config: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    turned: tuple[str, ...] = (),
    beside: Mapping[str, bytes] = MappingProxyType({}),
    lora: Lora | None = None,
    largest: int = LARGEST_FILE,
) -> list[Path]:
    """Writes the full weights of the checkpoint `path` into `folder` and returns the files.

    `dtype` rounds floating-point weights to another type; matrices whose name ends in one of `turned` are transposed. `beside`: other
    files of the folder, such as those of companions.py. `lora`: the adapters are added to the weights that they stand beside. The config says the type that is written: `from_pretrained` rounds to it.
    """
    folder = Path(folder)
    reader = Reader(path)
    weights = {name: entry for name, entry in reader.manifest.tensors.items() if name.startswith((PREFIX, BUFFER))}
    if not any(name.startswith(PREFIX) for name in weights):
        raise InputError(f"{path}: holds no weights of a model")
    if dtype is not None and (dtype not in DTYPES or not DTYPES[dtype].is_floating_point):
        raise InputError(f"dtype {dtype!r} is not a floating-point type{did_you_mean(dtype, DTYPES)}; such are float32, bfloat16, float16")
    if folder.exists() and any(folder.glob("model*.safetensors*")):
        raise InputError(f"folder {str(folder)!r} already holds weights; name another, or remove them first")
    items = []
    folded = Folded(reader, lora, config) if lora is not None else None
    for name, entry in sorted(weights.items()):
        if is_adapter(name) and folded is not None:
            continue
        kind = dtype if dtype and name.startswith(PREFIX) and DTYPES[entry.dtype].is_floating_point else entry.dtype
        shown = name.partition("/")[2].replace(BASE, ".")
        turn = shown.endswith(turned) and len(entry.shape) == 2
        shape = entry.shape[::-1] if turn else entry.shape
        items.append(Item(shown, kind, shape, entry.numel * DTYPES[kind].itemsize, partial(_full, folded or reader, name, kind, turn)))
    texts = dict(beside)
    if config is not None:
        written = dtype or next(entry.dtype for name, entry in sorted(weights.items()) if name.startswith(PREFIX))
        others = {key: value for key, value in config.items() if key != "torch_dtype"}
        texts["config.json"] = json.dumps({**others, "dtype": written}, indent=2).encode()
    return write_folder(folder, _files(items, texts, largest))


def _full(source: Reader | Folded, name: str, dtype: str, turn: bool) -> torch.Tensor:
    tensor = (source.full(name) if isinstance(source, Folded) else full(source, name)).to(DTYPES[dtype])
    return tensor.T if turn else tensor


def _files(items: list[Item], texts: dict[str, bytes], largest: int) -> dict[str, bytes | list[Item]]:
    """By name what each file holds, the index last: a folder cut short is no model."""
    groups: list[list[Item]] = [[]]
    room = largest
    for item in items:
        if groups[-1] and item.size > room:
            groups.append([])
            room = largest
        groups[-1].append(item)
        room -= item.size
    one = len(groups) == 1
    names = [WEIGHTS if one else f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    total = sum(item.size for item in items)
    if not one:
        where = {item.key: name for name, group in zip(names, groups, strict=True) for item in group}
        texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()
    return {**dict(zip(names, groups, strict=True)), **texts}


def import_weights(source: Path | str, folder: Path | str) -> Path:
    """The weights of `source` as the checkpoint of step 0 in `folder`."""
    weights = Weights(source)
    pieces = []
    for key in weights.entries:
        tensor = weights.whole(key)
        assert tensor is not None
        pieces.append((Piece(PREFIX + key, tuple(tensor.shape), dtype_name(tensor.dtype), None, (), 0, tensor.numel()), tensor.reshape(-1)))
    return save(folder, 0, pieces, {"imported": str(source)})
