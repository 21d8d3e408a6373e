"""Writes distributed checkpoints of Megatron-LM (`--ckpt-format torch_dist`) for Llama models: the reverse of
megatron.py, with the names that it describes.

A run of Megatron-LM continues with `--load FOLDER` at any tensor, pipeline and data parallel sizes. The checkpoint has
no random states (`no_save_rng`), and its learning-rate schedule is that of the run (--override-opt-param-scheduler).
The optimizer has two parameter groups, as Megatron makes them: matrices, and vectors without weight decay. The common
state has the options and the number of updates in the forms of the distributed optimizer and of the float32 optimizer.
Transformer Engine stores an extra state with each linear layer, which is empty unless the run uses FP8.

Sources: NVIDIA/Megatron-LM d98e8a64, training/checkpointing.py (`load_checkpoint`, `generate_state_dict`),
core/optimizer/optimizer.py (`FP32Optimizer.load_state_dict`, `_filter_and_reorder_param_groups`),
core/optimizer/distrib_optimizer.py (`load_state_dict`), core/dist_checkpointing/mapping.py
(`ShardedObject.unique_key`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.formats.dcp_write import StoredBox, write_boxes
from meshwright.checkpoint.formats.megatron import (
    COMMON_FILE,
    INNER_NAMES,
    LATEST_FILE,
    MAIN_WEIGHT_KIND,
    OUTER_NAMES,
    AttentionSizes,
)
from meshwright.checkpoint.formats.torch_state import LazyTensor, TorchState, save_durably
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How the optimizer states are divided, as Megatron states it."""
NEEDED_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
EXTRA_STATES = (
    "self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip
"""The modules of a layer that store an extra state."""


def write_megatron(content: TorchState, folder: Path) -> None:
    """Writes `content` into the new folder `folder`.

    Raises:
        InputError: the model is not a Llama, its configuration is unknown, or some weights have no optimizer states.
    """
    missing = [name for name in NEEDED_SIZES if not isinstance((content.config or {}).get(name), int)]
    if content.config is None or missing:
        raise InputError(
            Message("the form megatron needs {name} of the model: pass the config.json of a Llama with --config",
                name=missing[0])
        )  # fmt: skip
    sizes, layers = _sizes(content.config), int(content.config["num_hidden_layers"])
    kinds = sorted({kind for states in content.states.values() for kind in states})
    boxes = list(_boxes(content.weights, content, sizes, ""))
    if kinds:
        main = {name: _in_float32(one) for name, one in content.weights.items()}
        boxes += _boxes(main, content, sizes, f"optimizer.state.{MAIN_WEIGHT_KIND}.")
    for kind in kinds:
        tensors = {name: states[kind] for name, states in content.states.items() if kind in states}
        boxes += _boxes(tensors, content, sizes, f"optimizer.state.{kind}.")
    extra = {
        f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}": [None]
        for module in EXTRA_STATES
        for layer in range(layers)
    }
    target = folder / f"iter_{content.step:07d}"
    storage.make_folder(target)
    write_boxes(target, boxes, extra)
    save_durably(target / COMMON_FILE, _common(content, sizes, bool(kinds)))
    storage.write_file(target / "metadata.json", [json.dumps(METADATA).encode()])
    storage.write_file(folder / LATEST_FILE, [str(content.step).encode()])


def _sizes(config: Mapping[str, Any]) -> AttentionSizes:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return AttentionSizes(heads, int(config.get("num_key_value_heads") or heads), width, int(config["vocab_size"]))


def _in_float32(tensor: LazyTensor) -> LazyTensor:
    return LazyTensor(tensor.shape, "float32", lambda: tensor.read().float())


def _boxes(
    tensors: Mapping[str, LazyTensor], content: TorchState, sizes: AttentionSizes, prefix: str
) -> Iterator[StoredBox]:
    """Yields the tensors of Megatron that those of Llama give: stacked layers as one box for each layer. Raises
    InputError if a tensor is missing or not one of a Llama."""
    assert content.config is not None
    tied = bool(content.config.get("tie_word_embeddings"))
    left = dict.fromkeys(name for name in tensors if name not in content.buffers)
    if tied:
        left.pop("lm_head.weight", None)
    layers = int(content.config["num_hidden_layers"])
    for key, name in OUTER_NAMES.items():
        if name in left:
            del left[name]
            yield StoredBox(prefix + key, tensors[name].shape, (0,) * len(tensors[name].shape), tensors[name])
    made = {names: key for key, names in INNER_NAMES.items()}  # of two keys for one weight, the fused one
    for names, key in made.items():
        for layer in range(layers):
            parts = [f"model.layers.{layer}.{name}" for name, _ in names]
            found = [name for name in parts if name in left]
            if not found:
                continue
            if len(found) < len(parts):
                missing = next(name for name in parts if name not in left)
                raise InputError(
                    Message("the form megatron fuses {first} with {missing}, which the checkpoint does not have",
                        first=found[0], missing=prefix + missing)
                )  # fmt: skip
            for name in found:
                del left[name]
            fused = _fused([tensors[name] for name in parts], sizes, grouped=len(parts) == 3)
            yield StoredBox(prefix + f"decoder.layers.{key}", (layers, *fused.shape[1:]), _first(layer, fused), fused)
    if left or not any(name.startswith("model.layers.") for name in tensors):
        name = next(iter(left), "model.layers")
        raise InputError(
            Message(
                "{name} is not a weight of Megatron's Llama (RMSNorm, gated feed-forward, rotary positions); export it "
                "with --form dcp",
                name=name,
            )
        )


def _first(layer: int, box: LazyTensor) -> tuple[int, ...]:
    return (layer, *(0 for _ in box.shape[1:]))


def _fused(parts: list[LazyTensor], sizes: AttentionSizes, grouped: bool) -> LazyTensor:
    """Returns the weight of one layer with a leading dimension. `grouped`: for each query group its queries, its key
    and its value."""
    rows = sum(one.shape[0] for one in parts)
    shape = (1, rows, *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, partial(_read_fused, [one.read for one in parts], sizes.groups, grouped))


def _read_fused(reads: list[Callable[[], torch.Tensor]], groups: int, grouped: bool) -> torch.Tensor:
    tensors = [read() for read in reads]
    if grouped:
        split = [one.reshape(groups, -1, *one.shape[1:]) for one in tensors]
        return torch.cat(split, 1).flatten(0, 1).unsqueeze(0)
    return torch.cat(tensors).unsqueeze(0)


def _common(content: TorchState, sizes: AttentionSizes, trained: bool) -> dict[str, Any]:
    """Returns the state that is not in tensors: the arguments of the run, and the options of the optimizer."""
    config = content.config or {}
    arguments = argparse.Namespace(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"], num_attention_heads=sizes.heads, num_query_groups=sizes.groups,
        group_query_attention=sizes.groups != sizes.heads, kv_channels=sizes.width, vocab_size=sizes.vocabulary,
        padded_vocab_size=sizes.vocabulary, max_position_embeddings=config.get("max_position_embeddings"),
        add_position_embedding=True, position_embedding_type="rope", rotary_interleaved=False,
        rotary_base=(config.get("rope_parameters") or config).get("rope_theta", 10000.0), normalization="RMSNorm",
        norm_epsilon=config.get("rms_norm_eps", 1e-5), swiglu=True, add_bias_linear=False,
        add_qkv_bias=any(name.endswith("q_proj.bias") for name in content.weights),
        qk_layernorm=any(name.endswith("q_norm.weight") for name in content.weights),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, no_save_rng=True, no_save_optim=not trained,
        iteration=content.step, consumed_train_samples=content.samples,
    )  # fmt: skip
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": content.step, "content_metadata": CONTENT}
    if trained:
        steps = [scalars["step"] for scalars in content.scalars.values() if "step" in scalars]
        updates = int(max(steps, default=content.step))
        groups = [_group(content, updates, matrices) for matrices in (True, False)]
        state = {"state": {"common_step": updates}, "param_groups": groups}
        common["optimizer"] = {**state, "optimizer": state, "param_state_sharding_type": "fully_reshardable"}
        common["opt_param_scheduler"] = {"num_steps": content.samples}
    return common


def _group(content: TorchState, updates: int, matrices: bool) -> dict[str, Any]:
    """Returns a parameter group with the names by which Megatron finds it, and the options of the first of its
    parameters."""
    members = [name for name in content.states if (len(content.weights[name].shape) > 1) == matrices]
    options = next((group for group in content.groups if set(members) & set(group["params"])), {})
    plain = {key: value for key, value in options.items() if key != "params"}
    names = {"wd_mult": float(matrices), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**plain, **names, "step": updates}
