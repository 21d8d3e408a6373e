"""Loops of accelerate, transformers and DeepSpeed that `meshwright.recording` records."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from recorded_loops import STEPS, Setting, batch_of, build, sum_of_losses

from meshwright.interop.recording.recorder import recording


class EngineSetting(NamedTuple):
    """How an engine trains. `stage` is the ZeRO stage of DeepSpeed, `low` a 16-bit precision."""

    engine: str
    stage: int = 0
    low: str = ""
    micro_batches: int = 2
    seed: int = 0
    clip: float = 0.0
    fault: str = ""


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
