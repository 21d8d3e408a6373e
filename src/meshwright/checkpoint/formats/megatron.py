"""Reads distributed checkpoints of Megatron-LM (`--ckpt-format torch_dist`): DCP folders with Megatron's names.

The names are translated to those of Hugging Face's Llama, which Meshwright's Llama also uses. Layers are stacked along
a first dimension. A fused query-key-value weight has, for each query group, the rows of its queries, then one key, then
one value. The first layer of a gated feed-forward has the gate's rows, then those of the up projection. Optimizer
states are named `optimizer.state.KIND.WEIGHT`; the kind `fp32_param` is the main weight. They need the option
--dist-ckpt-optim-fully-reshardable, or the older form `fully_sharded_model_space`.

The numbers of heads are in the arguments of the run, which are in the file common.pt or in the item `args`.
megatron_write.py writes this form.

Sources: NVIDIA/Megatron-LM d98e8a64, core/transformer/attention.py (`get_query_key_value_tensors`),
core/transformer/transformer_block.py (`sharded_state_dict`), core/optimizer/distrib_optimizer.py
(`sharded_param_state_fully_reshardable`), core/dist_checkpointing/strategies/torch.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.formats.dcp import DcpFolder
from meshwright.checkpoint.formats.inert_pickle import PickledRecord, load_tensors
from meshwright.checkpoint.formats.source import ForeignState, ForeignTensor, check_dtype, full_range
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

COMMON_FILE = "common.pt"
LATEST_FILE = "latest_checkpointed_iteration.txt"
CLASSES = re.compile(r"megatron\.[\w.]+|transformer_engine\.[\w.]+|argparse\.Namespace|signal\.Signals")
"""The classes, other than those of tensors, in the arguments of a run. All become inert records."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
MAIN_WEIGHT_KIND = "fp32_param"

OUTER_NAMES = MappingProxyType({
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
})  # fmt: skip
INNER_NAMES = MappingProxyType({
    "input_layernorm.weight": (("input_layernorm.weight", ""),),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight", ""),),
    "self_attention.linear_qkv.weight": tuple((f"self_attn.{one}_proj.weight", one) for one in "qkv"),
    "self_attention.linear_qkv.bias": tuple((f"self_attn.{one}_proj.bias", one) for one in "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight", ""),),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight", ""),),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight", ""),),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight", ""),),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight", ""),),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "gate"), ("mlp.up_proj.weight", "up")),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight", ""),),
})  # fmt: skip
"""For the rest of a layer's key: the names in a layer of Llama, and the part of the tensor that each of them is."""


class AttentionSizes(NamedTuple):
    """The query heads, the query groups (key-value heads) and the width of a head; the rows of the vocabulary, 0 if
    unknown."""

    heads: int
    groups: int
    width: int
    vocabulary: int


def megatron_folder(path: Path) -> Path:
    """Returns the folder of the newest checkpoint below `path`, which Megatron's file of the latest iteration names.
    Returns `path` if there is no such file."""
    file = path / LATEST_FILE
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return path / f"iter_{int(text):07d}" if text.isdecimal() else path


def is_megatron(folder: DcpFolder) -> bool:
    """Returns whether the DCP checkpoint `folder` has the names of Megatron."""
    return any(_plain(key).startswith(("decoder.layers.", "decoder.final_layernorm.")) for key in folder.tensors)


def _plain(key: str) -> str:
    return key.removeprefix("model.").removeprefix("module.")


def read_megatron(folder: DcpFolder, weights_only: bool = False) -> ForeignState:
    """Returns the content of the Megatron checkpoint `folder` with the names of Llama.

    Raises:
        InputError: the model is not a Llama, the sizes of its attention are unknown, or the optimizer states depend on
            the layout of the run.
    """
    common = _common(folder)
    arguments = common.get("args")
    given = arguments.fields if isinstance(arguments, PickledRecord) else {}
    sizes = _attention_sizes(folder.path, given)
    weights: dict[str, ForeignTensor] = {}
    optimizer: dict[str, dict[str, ForeignTensor]] = {}
    for key in sorted(folder.tensors, key=lambda key: MAIN_WEIGHT_KIND in key):  # main weights replace rounded ones
        state = _STATE.fullmatch(key)
        if (state is not None or key.startswith("optimizer.")) and weights_only:
            continue
        if state is None and "optimizer.distributed" in key:
            raise InputError(
                Message(
                    "{path}: the optimizer states ({key}) have the layout of their run; save with "
                    "--dist-ckpt-optim-fully-reshardable, or import the weights alone with --weights-only",
                    path=folder.path, key=key,
                )
            )  # fmt: skip
        if key.endswith("_extra_state") or (state is None and key.startswith(("rng_state", "rerun_state"))):
            continue
        kind = state[1] if state else MAIN_WEIGHT_KIND
        target = weights if kind == MAIN_WEIGHT_KIND else optimizer.setdefault(kind, {})
        target.update(_translated(folder, key, _plain(state[2] if state else key), sizes))
    for kind, tensors in optimizer.items():
        for name, tensor in tensors.items():
            if name not in weights or tensor.shape != weights[name].shape:
                raise InputError(
                    Message(
                        "{path}: optimizer state {key} has shape {shape}, its weight {other}: only elementwise states "
                        "are read",
                        path=folder.path, key=f"{kind}.{name}", shape=list(tensor.shape),
                        other=list(weights[name].shape) if name in weights else "-",
                    )
                )  # fmt: skip
    step = int(common.get("iteration") or 0)
    updates, groups = _updates(common, step)
    steps = dict.fromkeys((name for kind in optimizer.values() for name in kind), updates)
    named = [{**groups[0], "params": list(weights)}] if len(groups) == 1 and optimizer else []
    left_out = sorted(common.keys() - {"args", "iteration", "optimizer", "checkpoint_version", "content_metadata"})
    return ForeignState("megatron", weights, optimizer, steps, step, named, left_out)


def _common(folder: DcpFolder) -> dict[str, Any]:
    """Returns the state that is not in tensors: of the file common.pt, or of the items of the checkpoint."""
    file = folder.path / COMMON_FILE
    if file.is_file():
        found = load_tensors(file, file, CLASSES)
        return found if isinstance(found, dict) else {}
    wanted = ("args", "iteration", "optimizer")
    return {key: folder.read_item(folder.values[key], CLASSES) for key in wanted if key in folder.values}


def _attention_sizes(path: Path, given: Mapping[str, Any]) -> AttentionSizes:
    heads = given.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise InputError(
            Message("{path} does not state the number of attention heads: copy its file common.pt too", path=path)
        )
    if given.get("rotary_interleaved"):
        raise InputError(
            Message("{path} was trained with --rotary-interleaved, but Llama rotates halves of a head", path=path)
        )
    width = given.get("kv_channels") or given["hidden_size"] // heads
    groups = given.get("num_query_groups") if given.get("group_query_attention") else None
    return AttentionSizes(heads, groups or heads, width, int(given.get("vocab_size") or 0))


def _updates(common: Mapping[str, Any], step: int) -> tuple[float, list[dict[str, Any]]]:
    """Returns the number of updates and the parameter groups that the optimizer records."""
    state = common.get("optimizer")
    while isinstance(state, dict) and "param_groups" not in state and "optimizer" in state:
        state = state["optimizer"]
    if not isinstance(state, dict):
        return float(step), []
    groups = state.get("param_groups", [])
    usual = next((group["step"] for group in groups if "step" in group), step)
    return float((state.get("state") or {}).get("common_step", usual)), groups


def _translated(folder: DcpFolder, key: str, name: str, sizes: AttentionSizes) -> Iterator[tuple[str, ForeignTensor]]:
    """Yields the names and tensors of Llama that the tensor `key` contains. `name` is the name of its weight."""
    shape, dtype, _ = folder.tensors[key]
    check_dtype(folder.path, key, dtype)
    folder.check_covered(key)
    if name in OUTER_NAMES:
        rows = sizes.vocabulary if len(shape) == 2 and 0 < sizes.vocabulary < shape[0] else shape[0]
        read = partial(_cut, folder, key, rows)  # the vocabulary is padded
        yield OUTER_NAMES[name], ForeignTensor((rows, *shape[1:]), dtype, full_range((rows, *shape[1:]), read))
        return
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] not in INNER_NAMES:
        raise InputError(
            Message(
                "{path}: {key} is not a tensor of Megatron's Llama (RMSNorm, gated feed-forward, rotary positions)",
                path=folder.path, key=key,
            )
        )  # fmt: skip
    for number in [int(layer[1])] if layer[1] else range(shape[0]):
        row = None if layer[1] else number
        inner = shape if layer[1] else shape[1:]
        for target, part in INNER_NAMES[layer[2]]:
            choose = partial(_part, part=part, sizes=sizes)
            with torch.device("meta"):
                found = tuple(choose(torch.empty(inner)).shape)
            read = partial(_read_part, folder, key, row, choose)
            yield f"model.layers.{number}.{target}", ForeignTensor(found, dtype, full_range(found, read))


def _cut(folder: DcpFolder, key: str, rows: int) -> torch.Tensor:
    return folder.read_full(key)[:rows]


def _read_part(
    folder: DcpFolder, key: str, row: int | None, choose: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    return choose(folder.read_full(key, row))


def _part(fused: torch.Tensor, part: str, sizes: AttentionSizes) -> torch.Tensor:
    """Returns the `part` of a fused tensor: 'q', 'k' or 'v' of the attention, 'gate' or 'up' of the feed-forward, ''
    for the whole."""
    if part in ("gate", "up"):
        return fused.chunk(2)[part == "up"]
    if not part:
        return fused
    per_group = sizes.heads // sizes.groups
    grouped = fused.reshape(sizes.groups, per_group + 2, sizes.width, *fused.shape[1:])
    chosen = grouped[:, :per_group] if part == "q" else grouped[:, per_group + (part == "v")]
    return chosen.reshape(math.prod(chosen.shape) // math.prod(fused.shape[1:]), *fused.shape[1:])
