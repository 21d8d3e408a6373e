"""Trains tiny models of transformers with its Trainer under its own parallel modes, recorded, and compares the
gradients with plain autograd on one device.

The comparison with autograd uses nothing of the recording: it tests what a recording says about a run. Every row of a
batch has another number of padded labels, and a step has two micro-batches on each rank.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from model_families import FAMILIES, batch_of, build_family, objective_of
from recorded_engines import set_environment
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshwright.interop.recording.recorder import recording
from meshwright.train.proof.reference_run import use_float64

STEPS, ROWS, MICRO_BATCHES, MAX_NORM, RATE = 2, 8, 2, 1.0, 1e-2
MODES = MappingProxyType(
    {
        "DDP": {},
        "FSDP2": {"fsdp_size": 2},
        "TP": {"tp_size": 2, "tp_plan": "auto"},
        "EP": {"fsdp_size": 2, "ep_size": 2},
        "TP+EP": {"tp_size": 2, "ep_size": 2},
        "plain loop": {},
    }
)
"""The arguments of `DistributedConfig` on two ranks. The last mode is no Trainer: a loop over DDP that divides the loss
of the model by the number of micro-batches."""


class LoopResult(NamedTuple):
    """For each step: the gradients before clipping as full tensors, their norm, and the loss that the loop reports."""

    gradients: list[dict[str, torch.Tensor]]
    norms: list[float]
    losses: list[float]


def rows_of(family: str) -> list[dict[str, torch.Tensor]]:
    """The examples of all steps, in the order in which the loops read them."""
    return [
        {key: value[row] for key, value in batch_of(family, step, ROWS).items()}
        for step in range(STEPS)
        for row in range(ROWS)
    ]


def train_under(folder: str, saved: str, family: str, mode: str) -> LoopResult:
    """Loads the model in the folder `saved` under a mode on this rank, and records two steps into `folder`."""
    set_environment()
    import transformers
    from accelerate.state import AcceleratorState
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    AcceleratorState._reset_state(True)
    sizes = MODES[mode]
    given = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = getattr(transformers, FAMILIES[family][0]).from_pretrained(saved, **given)
    try:
        return (_plain_loop if mode == "plain loop" else _trainer)(folder, model, family, mode)
    finally:
        AcceleratorState._reset_state(True)


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model on this rank, those of DTensors gathered."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
        for name, grad in found.items()
    }


def _trainer(folder: str, model: Any, family: str, mode: str) -> LoopResult:
    from accelerate import ParallelismConfig
    from transformers import PrinterCallback, Trainer, TrainingArguments

    found = LoopResult([], [], [])

    class ObservedTrainer(Trainer):
        def _clip_grad_norm(self, wrapped: Any) -> Any:
            found.gradients.append(full_gradients(model))
            return super()._clip_grad_norm(wrapped)

    # accelerate admits tensor parallelism on accelerators only; nothing else of it depends on the device
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None  # type: ignore[method-assign]
    arguments = TrainingArguments(
        output_dir=f"{folder}-run",
        per_device_train_batch_size=ROWS // MICRO_BATCHES // (1 if "tp_size" in MODES[mode] else 2),
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_NORM,
        train_sampling_strategy="sequential",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        ddp_backend="gloo",
    )
    trainer = ObservedTrainer(model, arguments, train_dataset=rows_of(family))
    trainer.remove_callback(PrinterCallback)
    with recording(folder, trainer.model, steps=STEPS):
        trainer.train()
    for each in trainer.state.log_history[:STEPS]:
        found.norms.append(float(each["grad_norm"]))
        found.losses.append(each["loss"])
    return found


def _plain_loop(folder: str, model: Any, family: str, mode: str) -> LoopResult:
    world = dist.get_world_size()
    wrapped = DistributedDataParallel(model.train(), find_unused_parameters=True)
    optimizer, own = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), ROWS // MICRO_BATCHES // world
    found, losses = LoopResult([], [], []), torch.zeros(STEPS)
    with recording(folder, wrapped, steps=STEPS):
        for step in range(STEPS):
            batch = batch_of(family, step, ROWS)
            for micro in range(MICRO_BATCHES):
                begin = (micro * world + dist.get_rank()) * own
                loss = wrapped(**{key: value[begin : begin + own] for key, value in batch.items()}).loss / MICRO_BATCHES
                loss.backward()
                losses[step] += loss.detach() / world
            found.gradients.append(full_gradients(model))
            found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(losses)
    return found._replace(losses=losses.tolist())


def train_on_one_device(family: str) -> LoopResult:
    """The same steps with plain autograd in float64. The loss is the cross entropy of all rows, added up and divided by
    the number of valid labels."""
    model = use_float64(build_family(family).double()).train()
    optimizer, found = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), LoopResult([], [], [])
    for step in range(STEPS):
        batch = batch_of(family, step, ROWS)
        labels = batch.pop("labels")
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        logits = model(**inputs).logits
        if objective_of(family) == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        found.gradients.append(full_gradients(model))
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        found.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def differences(found: LoopResult, expected: LoopResult) -> list[float]:
    """For each step: the norm of the difference of all gradients relative to their norm, or the relative difference of
    the norm that the loop computes, if it is larger. A gradient that only one of the two has counts in full."""
    zero, values = torch.zeros(()), []
    for step, (mine, other) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        pairs = [(mine.get(name, zero).double(), other.get(name, zero)) for name in mine.keys() | other.keys()]
        size = torch.stack([two.norm() for _, two in pairs]).norm()
        off = float(torch.stack([(one - two).norm() for one, two in pairs]).norm() / size)
        values.append(max(off, abs(found.norms[step] / expected.norms[step] - 1)))
    return values
