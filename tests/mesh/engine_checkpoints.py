"""Checkpoints in the layout of DeepSpeed and of Megatron-LM, written from the description of their public sources
(checkpoint/formats/deepspeed.py and megatron.py name them), for tests on machines without these systems."""

from __future__ import annotations

import argparse
import enum
import itertools
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


@contextmanager
def foreign_classes(*names: str) -> Iterator[dict[str, type]]:
    """Classes that pickle under the given full names, while the block runs."""
    made, modules = {}, {}
    for full in names:
        module, _, name = full.rpartition(".")
        base: Any = enum.IntEnum(name, ["one", "two", "three"]) if name.endswith("Enum") else type(name, (), {})
        base.__module__, base.__qualname__ = module, name
        for parent in itertools.accumulate(module.split("."), "{}.{}".format):
            modules.setdefault(parent, types.ModuleType(parent))
        setattr(modules[module], name, base)
        made[name] = base
    installed = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield made
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(installed)


ZERO_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def write_zero(
    folder: Path, stage: int, world: int, weights: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], step: int
) -> Path:
    """A ZeRO checkpoint of stage 1, 2 or 3: exp_avg is the weight plus 1, exp_avg_sq its square."""
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    kinds = {"fp32": weights, "exp_avg": {k: v + 1 for k, v in weights.items()}}
    kinds["exp_avg_sq"] = {k: v.square() for k, v in weights.items()}
    with foreign_classes(*ZERO_CLASSES) as classes:
        for rank in range(world):
            flats, mapping = (_stage3 if stage == 3 else _partition)(kinds, rank, world, classes)
            base = {
                "state": {0: {"step": torch.tensor(float(step)), "exp_avg": flats["exp_avg"],
                    "exp_avg_sq": flats["exp_avg_sq"]}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, "params": [0]}],
            }  # fmt: skip
            state = {
                "loss_scaler": classes["LossScaler"](), "overflow": False,
                "zero_stage": classes["ZeroStageEnum"](stage), "partition_count": world if stage == 3 else [world],
                "ds_version": "0.19.8",
            }  # fmt: skip
            if stage == 3:
                state |= {"optimizer_state_dict": base, "fp32_flat_groups": [flats["fp32"]]}
            else:
                state |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flats["fp32"]],
                    "param_slice_mappings": [mapping], "group_paddings": [0]}  # fmt: skip
            torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
                tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")  # fmt: skip
    placeholders = {name: torch.empty(0) if stage == 3 else one for name, one in weights.items()}
    model = {
        "module": {**placeholders, **buffers}, "buffer_names": list(buffers), "optimizer": None,
        "param_shapes": [OrderedDict((name, one.shape) for name, one in weights.items())], "frozen_param_shapes": None,
        "shared_params": {}, "frozen_param_fragments": None, "lr_scheduler": {"last": 1}, "skipped_steps": 0,
        "global_steps": step, "global_samples": 8 * step, "dp_world_size": world, "mp_world_size": 1,
        "ds_version": "0.19.8",
    }  # fmt: skip
    names = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(world)] if stage == 3 else ["mp_rank_00"]
    for name in names:
        torch.save(model, tag / f"{name}_model_states.pt")
    return tag


def _partition(kinds: Any, rank: int, world: int, classes: dict[str, type]) -> tuple[dict[str, torch.Tensor], Any]:
    """The flat vector of all parameters, padded and divided equally; where each parameter is in this rank's part."""
    flats = {kind: torch.cat([one.reshape(-1) for one in tensors.values()]) for kind, tensors in kinds.items()}
    total = flats["fp32"].numel()
    size = -(-total // (2 * world)) * 2
    start, stop = rank * size, (rank + 1) * size
    mapping: Any = OrderedDict()
    offset = 0
    for name, one in kinds["fp32"].items():
        first, last = max(offset, start), min(offset + one.numel(), stop)
        if first < last:
            address = classes["fragment_address"]()
            address.__dict__.update(numel=last - first, start=first - start)
            mapping[name] = address
        offset += one.numel()
    padded = {kind: torch.cat([flat, torch.zeros(size * world - total)])[start:stop] for kind, flat in flats.items()}
    return {**padded, "fp32": flats["fp32"][start : min(stop, total)].clone()}, mapping


def _stage3(kinds: Any, rank: int, world: int, classes: dict[str, type]) -> tuple[dict[str, torch.Tensor], Any]:
    flats = {}
    for kind, tensors in kinds.items():
        parts = []
        for one in tensors.values():
            share = -(-one.numel() // world)
            parts.append(torch.cat([one.reshape(-1), torch.zeros(share * world - one.numel())])[rank * share :][:share])
        flats[kind] = torch.cat(parts)
    return flats, None


def write_megatron(
    folder: Path,
    weights: dict[str, torch.Tensor],
    heads: int,
    groups: int,
    step: int,
    *,
    padded: int = 0,
    moments: dict[str, dict[str, torch.Tensor]] | None = None,
    distributed: bool = True,
) -> Path:
    """A torch_dist checkpoint of the Llama with `weights`, of the distributed optimizer or of the float32 optimizer.
    Without `moments`, exp_avg is the weight plus 1, and exp_avg_sq its square."""
    target = folder / f"iter_{step:07d}"
    (target).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    state: dict[str, Any] = _megatron_names(weights, groups, padded)
    if moments is None:
        changes = (("exp_avg", lambda t: t + 1), ("exp_avg_sq", torch.square))
        moments = {kind: {name: change(one) for name, one in weights.items()} for kind, change in changes}
    for kind, tensors in {"fp32_param": weights, **moments}.items():
        changed = _megatron_names(tensors, groups, padded)
        state |= {f"optimizer.state.{kind}.{name}": one for name, one in changed.items()}
    model = {name: one.bfloat16() for name, one in state.items() if not name.startswith("optimizer.")}
    state |= {**model, "rng_state": torch.zeros(3)}
    dcp.save(state, checkpoint_id=target, no_dist=True)
    hidden = weights["model.norm.weight"].numel()
    with foreign_classes("megatron.core.transformer.enums.AttnBackend") as classes:
        arguments = argparse.Namespace(
            num_attention_heads=heads, num_query_groups=groups, group_query_attention=True, kv_channels=hidden // heads,
            hidden_size=hidden, vocab_size=weights["lm_head.weight"].shape[0], params_dtype=torch.bfloat16,
            attention_backend=classes["AttnBackend"](), rotary_interleaved=False,
        )  # fmt: skip
        options = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "step": step, "params": [0]}
        optimizer: Any = {"optimizer": {"param_groups": [options]}}
        if not distributed:  # the number of updates is common to all weights
            optimizer = {"state": {"common_step": step}, "param_groups": [{**options, "step": 1}]}
        torch.save(
            {"args": arguments, "iteration": step, "checkpoint_version": 3.0, "opt_param_scheduler": {"lr": 1.0},
                "optimizer": optimizer},
            target / "common.pt",
        )  # fmt: skip
    return target


def _megatron_names(weights: dict[str, torch.Tensor], groups: int, padded: int) -> dict[str, torch.Tensor]:
    """The stacked and fused tensors of Megatron, made of those of Llama."""
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))

    def each(name: str) -> list[torch.Tensor]:
        return [weights[f"model.layers.{layer}.{name}"] for layer in range(layers)]

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
        return torch.cat([one for group in parts for one in group])

    def vocabulary(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([one, torch.zeros(padded, *one.shape[1:])])

    attention = zip(*(each(f"self_attn.{one}_proj.weight") for one in "qkv"), strict=True)
    inside = {
        "self_attention.linear_qkv.weight": [fused(*one) for one in attention],
        "self_attention.linear_qkv.layer_norm_weight": each("input_layernorm.weight"),
        "self_attention.linear_proj.weight": each("self_attn.o_proj.weight"),
        "mlp.linear_fc1.layer_norm_weight": each("post_attention_layernorm.weight"),
        "mlp.linear_fc1.weight": [
            torch.cat(pair) for pair in zip(each("mlp.gate_proj.weight"), each("mlp.up_proj.weight"), strict=True)
        ],
        "mlp.linear_fc2.weight": each("mlp.down_proj.weight"),
    }
    return {
        "embedding.word_embeddings.weight": vocabulary(weights["model.embed_tokens.weight"]),
        "output_layer.weight": vocabulary(weights["lm_head.weight"]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        **{f"decoder.layers.{name}": torch.stack(one) for name, one in inside.items()},
    }


def llama_weights(layers: int = 2, heads: int = 4, groups: int = 2, width: int = 4, vocab: int = 13) -> Any:
    """Random weights with the names of Llama."""
    hidden, ffn = heads * width, 24
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(layers):
        inner = {
            "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden), "self_attn.k_proj.weight": (groups * width, hidden),
            "self_attn.v_proj.weight": (groups * width, hidden), "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
    torch.manual_seed(5)
    assert all(math.prod(shape) for shape in shapes.values())
    return {name: torch.randn(shape) for name, shape in shapes.items()}
