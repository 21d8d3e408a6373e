"""Loops of accelerate, transformers, DeepSpeed and Megatron-Core that `meshwright.recording` records."""

from __future__ import annotations

import os
import re
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from recorded_loops import LENGTH, STEPS, VOCABULARY, Setting, batch_of, build, sum_of_losses
from torch.nn import functional as F

from meshwright.interop.recording.findings import RecordingReport
from meshwright.interop.recording.recorder import recording
from meshwright.interop.recording.verify_recording import verify_recording


class EngineSetting(NamedTuple):
    """How an engine trains. `stage` is the ZeRO stage of DeepSpeed, `low` a 16-bit precision. `pipeline`: with a
    stage of the model on each rank."""

    engine: str
    stage: int = 0
    low: str = ""
    micro_batches: int = 2
    seed: int = 0
    clip: float = 0.0
    fault: str = ""
    pipeline: bool = False


def set_environment(port: int = 29511) -> None:
    """The variables that torchrun sets. The ranks have joined their group already. The engines' own warnings, which
    are errors in this suite, are ignored."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }


def batches(setting: EngineSetting, step: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    """The micro-batches of this rank, and the number of valid labels of all ranks."""
    rank, world, own = dist.get_rank(), dist.get_world_size(), setting.micro_batches
    every = [batch_of(Setting(seed=setting.seed), step, at) for at in range(world * own)]
    return every[rank * own : (rank + 1) * own], sum(int((labels[:, 1:] != -100).sum()) for _, labels in every)


def accelerate_loop(folder: str, setting: EngineSetting) -> None:
    """Trains with accelerate: `prepare`, `accumulate`, `backward` and `clip_grad_norm_`."""
    set_environment()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    own, world = setting.micro_batches, dist.get_world_size()
    accelerator = Accelerator(cpu=True, mixed_precision=setting.low or "no", gradient_accumulation_steps=own)
    model = build(Setting(seed=setting.seed))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    with recording(folder, model, steps=STEPS) as recorder:
        for step in range(STEPS):
            data, count = batches(setting, step)
            for ids, labels in data:
                recorder.batch(labels=labels)
                with accelerator.accumulate(model):
                    loss = sum_of_losses(model(ids), labels) * world / count
                    # accelerate divides by the number of micro-batches
                    accelerator.backward(loss if setting.fault == "scaled twice" else loss * own)
                    if accelerator.sync_gradients and setting.clip:
                        accelerator.clip_grad_norm_(model.parameters(), setting.clip)
                    optimizer.step()
                    optimizer.zero_grad()
    AcceleratorState._reset_state(True)


def small_llama(seed: int) -> Any:
    """A model of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def transformers_trainer(folder: str, setting: EngineSetting) -> None:
    """Trains with the Trainer of transformers, which averages the loss over the labels of all micro-batches."""
    set_environment()
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    own, world = setting.micro_batches, dist.get_world_size()
    rows = [
        {"input_ids": ids[0], "labels": labels[0]}
        for step in range(STEPS)
        for at in range(own * world)
        for ids, labels in [batch_of(Setting(seed=setting.seed), step, at, rows=1)]
    ]
    arguments = TrainingArguments(
        output_dir=f"{folder}-run",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=own,
        max_steps=STEPS,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
        max_grad_norm=setting.clip,
        average_tokens_across_devices=setting.fault != "mean of means",
        ddp_backend="gloo",
    )
    trainer = Trainer(small_llama(setting.seed), arguments, train_dataset=rows)
    with recording(folder, trainer.model, steps=STEPS):
        trainer.train()
    AcceleratorState._reset_state(True)


def deepspeed_loop(folder: str, setting: EngineSetting) -> None:
    """Trains with DeepSpeed's engine."""
    set_environment()
    import deepspeed

    # it would compile for minutes, and gloo does not need it
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    own, world = setting.micro_batches, dist.get_world_size()
    model = build(Setting(seed=setting.seed))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": own,
        "zero_optimization": {"stage": setting.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": setting.clip,
    }
    if setting.low == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with recording(folder, engine, steps=STEPS) as recorder:
        for step in range(STEPS):
            data, count = batches(setting, step)
            for at, (ids, labels) in enumerate(data):
                recorder.batch(labels=labels)
                loss = sum_of_losses(engine(ids), labels) * world / count
                if not (setting.fault == "skipped micro-batch" and at == 1 and dist.get_rank() == 1):
                    # DeepSpeed divides by the number of micro-batches
                    engine.backward(loss * own)
                else:
                    engine.backward(loss * 0)
                engine.step()


class NoRandomStates:
    """Replaces Megatron's random states of CUDA devices."""

    def fork(self, *given: Any) -> Any:
        """Returns a context that changes nothing."""
        return nullcontext()


def megatron_model(seed: int, pipeline: int = 1) -> Any:
    """A GPT model of Megatron-Core: this rank's tensor-parallel shards, or its pipeline stage."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size() // pipeline, pipeline)
    # Megatron-Core asks for CUDA devices where the device does not matter
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.get_cuda_rng_tracker = NoRandomStates
    import_module("megatron.core.transformer.dot_product_attention").tensor_parallel = tensor_parallel
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        gated_linear_unit=True,
        activation_func=F.silu,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **dict.fromkeys(("gradient_accumulation_fusion", "bias_activation_fusion", "masked_softmax_fusion"), False),
        apply_rope_fusion=False,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY + 1,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def megatron_loss(losses: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """The sum of the losses of the valid tokens."""
    return (losses * batch["loss_mask"]).sum(), float(batch["loss_mask"].sum())


def megatron_loop(folder: str, setting: EngineSetting) -> None:
    """Trains a GPT model of Megatron-Core with tensor parallelism over all ranks."""
    set_environment()
    from megatron.core import parallel_state

    model = megatron_model(setting.seed)
    if setting.fault == "wrong shard":
        for parameter in model.decoder.layers[1].mlp.linear_fc1.parameters():
            dist.broadcast(parameter.data, 0)
    if setting.fault == "no reduction of outputs":  # as of an expert, whose outputs another module reduces
        model.decoder.layers[1].mlp.linear_fc2.explicit_expert_comm = True
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    causal = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]
    with recording(folder, model, steps=STEPS) as recorder:
        for step in range(STEPS):
            data = [batch_of(Setting(seed=setting.seed), step, at) for at in range(setting.micro_batches)]
            count = sum(int((labels != -100).sum()) for _, labels in data)
            for ids, labels in data:
                mask = (labels != -100).float()
                recorder.batch(loss_mask=mask)
                losses = model(ids, torch.arange(LENGTH).expand_as(ids), causal, labels=labels.clamp(min=0))
                (megatron_loss(losses, {"loss_mask": mask})[0] / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    parallel_state.destroy_model_parallel()


def megatron_pipeline(folder: str, setting: EngineSetting) -> None:
    """Trains a GPT model of Megatron-Core with a pipeline stage on each rank, all forwards before all backwards."""
    set_environment()
    from megatron.core import parallel_state

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = megatron_model(setting.seed, last + 1)
    first_layer = rank * len(model.decoder.layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    causal = torch.ones(LENGTH, LENGTH).tril().logical_not()[None, None]
    names = lambda name: re.sub(r"layers\.(\d+)", lambda found: f"layers.{first_layer + int(found[1])}", name)
    with recording(folder, model, steps=STEPS, names=names) as recorder:
        for step in range(STEPS):
            data = [batch_of(Setting(seed=setting.seed), step, at) for at in range(setting.micro_batches)]
            count, kept = sum(int((labels != -100).sum()) for _, labels in data), []
            for ids, labels in data:
                mask, given = (labels != -100).float(), torch.empty(LENGTH, len(ids), 16)
                recorder.batch(loss_mask=mask)
                if rank:
                    dist.recv(given, rank - 1)
                    model.set_input_tensor(given.requires_grad_())
                output = model(ids, torch.arange(LENGTH).expand_as(ids), causal, labels=labels.clamp(min=0))
                if rank == last:
                    output = megatron_loss(output, {"loss_mask": mask})[0] / count
                else:
                    dist.send(output.detach(), rank + 1)
                kept.append((given, output))
            for at, (given, output) in enumerate(kept):
                gradient = torch.ones_like(output)
                if rank != last:
                    dist.recv(gradient, rank + 1)
                if not (setting.fault == "skipped micro-batch" and rank == 0 and at == 1):
                    output.backward(gradient)
                if rank:
                    dist.send(given.grad, rank - 1)
            optimizer.step()
            optimizer.zero_grad()
    parallel_state.destroy_model_parallel()


def verify_megatron(folder: str, seed: int) -> RecordingReport:
    """Compares a recording of Megatron-Core with its model on one rank."""
    set_environment()
    return verify_recording(folder, lambda: megatron_model(seed), megatron_loss)
