"""Exports checkpoints to Hugging Face's format, for `meshwright checkpoint`.

An export is a folder of safetensors files with the full tensors under the model's own names. `export_weights` has one
tensor in memory at a time. Weights above 5 GB are written as several files and an index, which `from_pretrained` can
read. Source: huggingface/transformers,
`save_pretrained` (max_shard_size, `model.safetensors.index.json`).

Weights in 4 bits (QLoRA) are converted to the dtype of the other weights. LoRA adapters are either merged into the
weights or exported separately in the format of peft. A merged weight is W + (alpha / rank) B A in the saved dtype, with
the base weight W and the adapter matrices A and B. Merged weights are computed one layer at a time. If a layer stores
its weight as (in, out), the product B A is transposed. Source: huggingface/peft, `adapter_config.json` and
`adapter_model.safetensors` (keys without the name of the adapter, with the prefix 'base_model.model.').

Guarantees:
- Files of an export are written under temporary names and renamed in order. So if the last file exists, all files do.
- A failed export leaves no files.

`read_extra_files` returns the other files of a Hugging Face folder: tokenizer, chat template and generation settings. A
tokenizer from a folder is copied file by file. For a tokenizer that Meshwright has trained, the settings that
`AutoTokenizer` needs are added. Nothing in these files is executed.

`hf_template` translates the sizes of a reference model (meshwright.models) into a Hugging Face config.json. A Llama
with biases only on query, key and value becomes a Qwen2. Hugging Face's GPT-2 stores its projections as (in, out), so
these matrices are transposed. BERT and the convolutional network differ from Hugging Face's models in more than names,
so they have no config.json.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from meshwright.analysis.nf4 import pair_table, unpack_nf4, weight_shape
from meshwright.checkpoint.export_folder import ADAPTER_WEIGHTS_FILE, check_export_folder
from meshwright.checkpoint.hf_weights import BUFFER_PREFIX, INDEX_FILE, WEIGHT_PREFIX, WEIGHTS_FILE
from meshwright.checkpoint.load import read_full_tensor
from meshwright.checkpoint.manifest import TensorEntry
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, PendingTensor, write_shard
from meshwright.checkpoint.verify import CheckpointReader
from meshwright.core import storage
from meshwright.core.codec import parse_text, read_text_file
from meshwright.core.errors import InputError, MeshwrightError, did_you_mean
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes
from meshwright.spec.huggingface_config import huggingface_config
from meshwright.spec.workload import LoraConfig

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
DECODER_START_KEY = "decoder_start_token_id"


def read_extra_files(tokenizer: Path | None, model: Path | None, end_of_text: str, mask: str) -> dict[str, bytes]:
    """Returns the contents of the files that accompany the weights, by file name.

    `tokenizer` and `model` are the folders of the run's tokenizer and model, None if there is no such folder.
    `end_of_text` and `mask` are the special tokens of a tokenizer that Meshwright has trained.
    """
    found = {
        name: storage.read_file(tokenizer / name, links=True)
        for name in TOKENIZER_FILES
        if tokenizer and storage.is_file(tokenizer / name)
    }
    if model is not None and (model / GENERATION_CONFIG_FILE).is_file():
        found[GENERATION_CONFIG_FILE] = (model / GENERATION_CONFIG_FILE).read_bytes()
    # The decoder start token is written to this file, because transformers prefers it to config.json.
    elif model is not None and (start := _decoder_start_token(model)) is not None:
        found[GENERATION_CONFIG_FILE] = json.dumps({DECODER_START_KEY: start}, indent=2).encode()
    if tokenizer is not None and found.keys() & set(TOKENIZER_FILES) == {"tokenizer.json"}:
        known = {
            entry["content"]: entry["id"]
            for entry in parse_text(found["tokenizer.json"].decode(), str(tokenizer))["added_tokens"]
        }
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        special = {"eos_token": end_of_text, "pad_token": end_of_text, "mask_token": mask}
        found[TOKENIZER_CONFIG_FILE] = json.dumps(
            {**settings, **{key: word for key, word in special.items() if word in known}}, indent=2
        ).encode()
        if end_of_text in known:
            ends = {"eos_token_id": known[end_of_text], "pad_token_id": known[end_of_text]}
            found[GENERATION_CONFIG_FILE] = json.dumps(
                {**json.loads(found.get(GENERATION_CONFIG_FILE, b"{}")), **ends}, indent=2
            ).encode()
    return found


def _decoder_start_token(model: Path) -> int | None:
    """Returns the id of the first decoder token of an encoder-decoder model, None if the configuration has none."""
    config = model / "config.json"
    found = parse_text(read_text_file(config), str(config)).get(DECODER_START_KEY) if config.is_file() else None
    return found if isinstance(found, int) else None


class HfTemplate(NamedTuple):
    """The config.json of a model, and the name suffixes of the matrices to transpose."""

    config: dict[str, Any]
    transposed: tuple[str, ...] = ()


def hf_template(sizes: Mapping[str, Any]) -> HfTemplate | None:
    """Returns the Hugging Face template of a reference model, None if transformers has no equivalent model.

    `sizes` has the keys of `models.registry`.
    """
    config = huggingface_config(sizes)
    if config is None:
        return None
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight") if config["model_type"] == "gpt2" else ()
    return HfTemplate(config, transposed)


def write_files_atomically(folder: Path, files: Mapping[str, bytes | Sequence[PendingTensor]]) -> list[Path]:
    """Writes `files`, a mapping from names to contents, into `folder` and returns their paths.

    All files are first written under temporary names, then renamed in the order of `files`. If anything fails, all
    these files are removed.

    Raises:
        InputError: the folder cannot be written.
        MeshwrightError: there is not enough free space.
    """
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
            raise export_error(folder, error) from None
        raise
    return done


def export_error(folder: Path, error: OSError) -> MeshwrightError:
    """Returns the error of a command that could not write an export to `folder`: an InputError, unless the disk is
    full."""
    kind = MeshwrightError if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
    return kind(Message("folder {folder!r}: {reason}; nothing is exported", folder=str(folder), reason=error.strerror))


LORA_BASE_INFIX, LORA_A_SUFFIX, LORA_B_SUFFIX = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
FAN_IN_FAN_OUT_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Model families whose layers store their weight as (in, out)."""
ADAPTER_CONFIG_FILE = "adapter_config.json"


def is_lora_weight(name: str) -> bool:
    """Returns whether the checkpoint tensor `name` is a weight of a LoRA adapter."""
    return name.startswith(WEIGHT_PREFIX) and name.endswith((LORA_A_SUFFIX, LORA_B_SUFFIX))


def read_weight(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Returns the full tensor `name`. A weight in 4 bits is converted to float64."""
    tensor = read_full_tensor(reader, name)
    return unpack_nf4(tensor, pair_table(), torch.float64) if is_packed(name, reader.manifest.tensors[name]) else tensor


def is_packed(name: str, entry: TensorEntry) -> bool:
    """Returns whether the checkpoint tensor `name` is the bytes of a frozen weight in 4 bits (analysis/nf4.py)."""
    return name.startswith(WEIGHT_PREFIX) and entry.dtype == "uint8"


def _is_plain_weight(name: str, entry: TensorEntry) -> bool:
    return name.startswith(WEIGHT_PREFIX) and not is_packed(name, entry)


def _without_packing(name: str, entry: TensorEntry, dtype: str) -> TensorEntry:
    """Returns the entry of the tensor that `read_weight` returns, in `dtype` if the weight is in 4 bits."""
    return entry.but(dtype=dtype, shape=tuple(weight_shape(entry.shape))) if is_packed(name, entry) else entry


class MergedLora:
    """Reads the full weights of a checkpoint and merges the LoRA adapters into them. `config` is the config.json of the
    model, None without one."""

    def __init__(self, reader: CheckpointReader, lora: LoraConfig, config: Mapping[str, Any] | None) -> None:
        self.reader, self.scale = reader, lora.alpha / lora.rank
        self.transposed = (config or {}).get("model_type") in FAN_IN_FAN_OUT_FAMILIES

    def read_full(self, name: str) -> torch.Tensor:
        """Returns the full weight `name`. If its layer has an adapter, the adapter is merged. Raises InputError if the
        shapes of the adapter and the weight differ."""
        weight = read_weight(self.reader, name)
        layer = name.removesuffix(f"{LORA_BASE_INFIX}weight")
        if layer == name or layer + LORA_A_SUFFIX not in self.reader.manifest.tensors:
            return weight
        change = self.scale * (
            read_full_tensor(self.reader, layer + LORA_B_SUFFIX) @ read_full_tensor(self.reader, layer + LORA_A_SUFFIX)
        )
        change = change.T if self.transposed else change
        if change.shape != weight.shape:
            raise InputError(
                Message(
                    "{path}: the adapter of {name} has shape {shape}, but its weight has shape {weight_shape}",
                    path=self.reader.path,
                    name=name,
                    shape=list(change.shape),
                    weight_shape=list(weight.shape),
                )
            )
        return weight + change.to(weight.dtype)


def export_adapter(
    path: Path, folder: Path, lora: LoraConfig, base: str, extra_files: Mapping[str, bytes]
) -> list[Path]:
    """Writes the LoRA adapters of the checkpoint `path` into `folder`, in the format that
    `peft.PeftModel.from_pretrained` reads.

    `base` is the folder of the base model. `extra_files` are other files to write, by name. Returns the written files.

    Raises:
        InputError: the checkpoint has no adapters, or the folder already has an adapter.
    """
    reader = CheckpointReader(path)
    names = sorted(name for name in reader.manifest.tensors if is_lora_weight(name))
    if not names:
        raise InputError(Message("checkpoint {path!r} has no LoRA adapters", path=str(path)))
    check_export_folder(folder, adapter=True)
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
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "target_modules": layers, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    return write_files_atomically(
        folder, {**extra_files, ADAPTER_CONFIG_FILE: json.dumps(config, indent=2).encode(), ADAPTER_WEIGHTS_FILE: items}
    )


MAX_SHARD_BYTES = 5 * 10**9


def export_weights(
    path: Path | str,
    folder: Path | str,
    config: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    transposed: tuple[str, ...] = (),
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
    lora: LoraConfig | None = None,
    largest: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes the full weights of the checkpoint `path` into `folder` and returns the files.

    `config` is the config.json to write, None for no such file. The dtype of the written weights is added to it,
    because `from_pretrained` converts weights to this dtype. `dtype` is the dtype to which floating-point weights are
    converted, None for no conversion. Matrices whose name ends in one of `transposed` are transposed. `extra_files` are
    other files to write, such as those of `read_extra_files`. If `lora` is given, the adapters are merged. A file has
    at most `largest` bytes, unless a single tensor is larger.

    Raises:
        InputError: the checkpoint has no weights, `dtype` is invalid, or the folder already has weights.
    """
    folder = Path(folder)
    reader = CheckpointReader(path)
    weights = {
        name: entry
        for name, entry in reader.manifest.tensors.items()
        if name.startswith((WEIGHT_PREFIX, BUFFER_PREFIX))
    }
    if not any(name.startswith(WEIGHT_PREFIX) for name in weights):
        raise InputError(Message("checkpoint {path!r} has no model weights", path=str(path)))
    if dtype is not None and (dtype not in DTYPE_BY_NAME or not DTYPE_BY_NAME[dtype].is_floating_point):
        raise InputError(
            Message(
                "dtype {dtype!r} is not a floating-point type{hint}; use float32, bfloat16 or float16",
                dtype=dtype,
                hint=did_you_mean(dtype, DTYPE_BY_NAME),
            )
        )
    check_export_folder(folder)
    plain = [entry.dtype for name, entry in sorted(weights.items()) if _is_plain_weight(name, entry)]
    written = dtype or plain[0]
    weights = {name: _without_packing(name, entry, written) for name, entry in weights.items()}
    merged = MergedLora(reader, lora, config) if lora is not None else None
    items = [
        _pending_export(merged or reader, name, entry, dtype, transposed)
        for name, entry in sorted(weights.items())
        if merged is None or not is_lora_weight(name)
    ]
    texts = dict(extra_files)
    if config is not None:
        others = {key: value for key, value in config.items() if key != "torch_dtype"}
        texts["config.json"] = json.dumps({**others, "dtype": written}, indent=2).encode()
    return write_files_atomically(folder, _shard_files(items, texts, largest))


def _pending_export(
    source: CheckpointReader | MergedLora, name: str, entry: TensorEntry, dtype: str | None, transposed: tuple[str, ...]
) -> PendingTensor:
    is_converted = dtype and name.startswith(WEIGHT_PREFIX) and DTYPE_BY_NAME[entry.dtype].is_floating_point
    kind = dtype if dtype and is_converted else entry.dtype
    key = name.partition("/")[2].replace(LORA_BASE_INFIX, ".")
    transpose = key.endswith(transposed) and len(entry.shape) == 2
    shape = entry.shape[::-1] if transpose else entry.shape
    size = entry.numel * DTYPE_BY_NAME[kind].itemsize
    return PendingTensor(key, kind, shape, size, partial(_read_full, source, name, kind, transpose))


def _read_full(source: CheckpointReader | MergedLora, name: str, dtype: str, transpose: bool) -> torch.Tensor:
    tensor = (source.read_full(name) if isinstance(source, MergedLora) else read_weight(source, name)).to(
        DTYPE_BY_NAME[dtype]
    )
    return tensor.T if transpose else tensor


def _shard_files(
    items: list[PendingTensor], texts: dict[str, bytes], largest: int
) -> dict[str, bytes | list[PendingTensor]]:
    """Returns the contents of each file by name: the weights in files of at most `largest` bytes, then `texts`. The
    index comes last, so that an incomplete folder cannot be loaded as a model."""
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
