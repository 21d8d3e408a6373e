"""Continues a run of Llama with megatron-core on the CPU: `python megatron_core_run.py FOLDER TP PP`. It imports
megatron-core once and forks the TP * PP ranks: on a loaded machine, imports take longer than everything else.

FOLDER/out is a checkpoint in Megatron's form, FOLDER/batches.pt the ids of the next steps. It loads model and optimizer
with megatron-core's own loader, takes the steps, saves them with its own writer as FOLDER/back and writes the losses to
FOLDER/losses.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

warnings.simplefilter("ignore")


def use_cpu() -> None:
    """megatron-core asks for the CUDA device in places where the device does not matter."""
    tensor = torch.tensor
    torch.tensor = lambda *given, device=None, **more: tensor(
        *given, device=device if device != "cuda" else None, **more
    )
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *given: None


def model_and_optimizer(args: Any, tp: int, pp: int) -> tuple[Any, Any]:
    """The model that the arguments of the checkpoint describe, and its float32 optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)

    class NoRandomState:
        def fork(self, *given: Any) -> Any:
            return contextlib.nullcontext()

    tensor_parallel.get_cuda_rng_tracker = NoRandomState
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels")
    config = TransformerConfig(
        **{name: getattr(args, name) for name in sizes}, normalization=args.normalization,
        gated_linear_unit=args.swiglu, layernorm_epsilon=args.norm_epsilon, add_bias_linear=args.add_bias_linear,
        use_cpu_initialization=True, activation_func=torch.nn.functional.silu, hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings, position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base, share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    names = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    groups = [
        {
            "params": [one for one in model.parameters() if (one.ndim > 1) == matrices],
            "wd_mult": matrices * 1.0,
            **names,
        }
        for matrices in (True, False)
    ]

    def fill(optimizer: Any, config: Any = None) -> None:
        for one in model.parameters():
            empty = {"exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one)}
            optimizer.state[one] = {"step": torch.tensor(1.0), **empty}

    return model, FP32Optimizer(torch.optim.AdamW(groups, lr=1.0), OptimizerConfig(optimizer="adam"), fill)


def step_of(model: Any, ids: torch.Tensor) -> float | None:
    """The loss of a forward and backward, which the last of at most two pipeline stages returns."""
    from megatron.core import parallel_state

    length, given = ids.shape[1], None
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not first:
        given = torch.empty(length, len(ids), model.config.hidden_size)
        dist.recv(given, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(given.requires_grad_())
    hidden = torch.ones(length, length).tril().logical_not()[None, None]
    output = model(ids, torch.arange(length).expand_as(ids), hidden)
    if not last:
        following = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(output.detach(), following)
        gradient = torch.empty_like(output)
        dist.recv(gradient, following)
        output.backward(gradient)
        return None
    loss = torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    if given is not None:
        dist.send(given.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    return loss.item()


def main(folder: Path, tp: int, pp: int, rank: int) -> None:
    from megatron.core import dist_checkpointing

    place = folder / "out" / f"iter_{int((folder / 'out' / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    common = dist_checkpointing.load_common_state_dict(str(place))
    model, optimizer = model_and_optimizer(common["args"], tp, pp)
    state = {"model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True)
    state = dist_checkpointing.load(state, str(place), strict="raise_unexpected")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = []
    for ids in torch.load(folder / "batches.pt"):
        optimizer.optimizer.zero_grad()
        losses.append(step_of(model, ids))
        optimizer.optimizer.step()
    step = common["iteration"] + len(losses)
    target = folder / "back" / f"iter_{step:07d}"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    (folder / "back" / "latest_checkpointed_iteration.txt").write_text(str(step))
    state = {"model": model.sharded_state_dict(), "args": common["args"], "iteration": step, "checkpoint_version": 3.0}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"])
    dist_checkpointing.save(state, str(target))
    if losses[0] is not None and rank % tp == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def run_rank(rank: int, folder: Path, tp: int, pp: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp * pp)}
    store = dist.FileStore(str(folder / "store"), tp * pp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp * pp, timeout=timedelta(minutes=3))
    main(folder, tp, pp, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    for module in ("dist_checkpointing", "optimizer.optimizer", "models.gpt.gpt_layer_specs"):
        import_module(f"megatron.core.{module}")
    folder, (tp, pp) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    use_cpu()
    start_processes(run_rank, (folder, tp, pp), tp * pp, start_method="fork")
