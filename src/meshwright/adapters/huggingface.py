"""`MeshwrightTrainer`: the Trainer of transformers, whose steps run under a plan of Meshwright.

    trainer = MeshwrightTrainer(model=model, args=args, train_dataset=data, plan="auto")
    trainer.train(resume_from_checkpoint=True)

Data order, learning rates, callbacks, logs and checkpoint folders are those of transformers. A step (forward, backward,
clipping, update) is one of Meshwright, with its proof before the first update. Every rank reads the global batch, which
has `per_device_train_batch_size` x ranks rows.

A checkpoint folder has the full weights as transformers writes them, and the sharded training state in `meshwright/`,
which any plan continues. `resume_from_checkpoint=True` continues from the newest complete checkpoint, and starts at
step 0 if there is none. So a script under `torchrun --max-restarts` recovers by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.own_loop import parallelize
from meshwright.spec.plan import Plan

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer as TransformersTrainer
except ImportError as error:
    raise InputError(
        Message("MeshwrightTrainer needs transformers and accelerate: pip install 'meshwright[trainer]'")
    ) from error

STATE_FOLDER, SCHEDULER_FILE, LAST_FILE = "meshwright", "scheduler.pt", "trainer_state.json"
"""Entries of a checkpoint folder. transformers writes LAST_FILE last, so a folder that has it is complete."""


class MeshwrightTrainer(TransformersTrainer):
    """A `transformers.Trainer` that trains under `plan`: a plan, its name, or 'auto' (mw.parallelize)."""

    def __init__(self, *given: Any, plan: Plan | str = "auto", options: Mapping[str, Any] | None = None, **named: Any):
        """`options`: further arguments of `mw.parallelize`, such as precision, loss or prove. The other arguments are
        those of `transformers.Trainer`.

        Raises:
            InputError: An argument asks for something that the plan or Meshwright does.
        """
        super().__init__(*given, **named)
        self.plan, self.options = plan, dict(options or {})
        self.sharded: Any = None
        """The trainer of Meshwright once training has begun (`meshwright.train.trainer.Trainer`)."""
        self._gradient_norm = 0.0
        self._check()

    def _check(self) -> None:
        accumulated = self.args.gradient_accumulation_steps
        rows = self.args.per_device_train_batch_size * accumulated
        wrong = None
        if accumulated > 1:
            wrong = Message(
                "gradient_accumulation_steps is {steps}, but the plan divides the batch into micro-batches: set it "
                "to 1 and per_device_train_batch_size to {rows}",
                steps=accumulated,
                rows=rows,
            )
        elif self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.deepspeed or self.args.fsdp:
            wrong = Message("deepspeed and fsdp would shard the model a second time: leave them out of args")
        elif self.compute_loss_func is not None or type(self).compute_loss is not TransformersTrainer.compute_loss:
            wrong = Message(
                "a loss of one's own is a function of the output and the batch: give options={{'loss': "
                "function(output, batch)}} instead of compute_loss"
            )
        elif self.compute_metrics is not None:
            wrong = Message("compute_metrics needs the logits of all rows on one rank: leave it out")
        if wrong is not None:
            raise InputError(Message("MeshwrightTrainer: {what}", what=wrong))

    # --- data

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *given: Any, **named: Any) -> Any:
        """Returns the loader of the global batches, which every rank reads in the same order."""
        accelerator, seed = self.accelerator, self.args.data_seed
        prepare = partial(
            prepare_data_loader,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            use_seedable_sampler=True,
            data_seed=self.args.seed if seed is None else seed,
        )
        vars(accelerator)["prepare"] = prepare  # for this call: the method would give each rank other rows
        try:
            return super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *given, **named)
        finally:
            del vars(accelerator)["prepare"]

    # --- training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Trains as `transformers.Trainer.train`. True continues from the newest complete checkpoint, if any."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(Path(self.args.output_dir or ""))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Shards the model instead of wrapping it, and restores a checkpoint. Returns the model and the loader."""
        if self.sharded is not None:
            raise InputError(Message("MeshwrightTrainer: train runs once; make a new trainer to go on"))
        args = self.args
        model: Any = self.model
        kind = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        options = {
            "precision": kind,
            "clip": args.max_grad_norm or None,
            "seed": args.seed,
            "example": dict(next(iter(train_dataloader))),
            **self.options,
        }
        self.create_optimizer()
        template: Any = self.optimizer
        self.sharded = parallelize(model, lambda _: self._new_optimizer(), self.plan, **options)
        self.optimizer = template
        for group in template.param_groups:
            group["params"] = []  # the sharded weights have an optimizer of their own; this one has the learning rates
        self.lr_scheduler = None
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = model
        self.accelerator._models.append(model)  # an evaluation would move the weights to new memory otherwise
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _new_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = None
        return self.create_optimizer()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Runs one step of Meshwright on the global batch. Returns its mean loss over valid labels."""
        rates: Any = self.optimizer
        model.train()
        for group, wanted in zip(self.sharded.optimizer.param_groups, rates.param_groups, strict=True):
            group["lr"] = wanted["lr"]
        record = self.sharded.step(dict(inputs))
        self._gradient_norm = record.gradient_norm
        return torch.tensor(record.loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._gradient_norm  # the step has clipped already

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return self._gradient_norm

    def prediction_step(self, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Any:
        """Returns the loss of the global batch, without logits. Before training, the model is not sharded yet."""
        if self.sharded is None:
            return super().prediction_step(model, inputs, *given, **named)
        return torch.tensor(self.sharded.evaluate(dict(inputs)), device=self.args.device), None, None

    # --- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the full weights as `from_pretrained` reads them. All ranks call it."""
        if self.sharded is None:
            return super().save_model(output_dir, _internal_call)
        full = self.sharded.full_state_dict()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=full)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.sharded.save(Path(output_dir) / STATE_FOLDER)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        (step,) = (Path(checkpoint) / STATE_FOLDER).glob("step-*")
        self.sharded.load(step)
        scheduler: Any = self.lr_scheduler
        optimizer: Any = self.optimizer
        scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True))
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def newest_checkpoint(folder: Path) -> str | None:
    """Returns the complete checkpoint of the latest step in `folder`, None if there is none."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{LAST_FILE}")]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None
