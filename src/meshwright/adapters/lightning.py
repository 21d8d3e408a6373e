"""`MeshwrightStrategy`: a strategy of Lightning whose steps run under a plan of Meshwright.

    trainer = Trainer(strategy=MeshwrightStrategy(plan="auto"), devices=8, max_epochs=3)
    trainer.fit(module, loader, ckpt_path="last")

Loops, callbacks, loggers, learning rates and checkpoint files are those of Lightning. A step (forward, backward,
clipping, update) is one of Meshwright, with its proof before the first update. Every rank reads the same batches: a
batch of the loader is the global batch, as on one device.

The module is sharded at its first training batch. The model that Meshwright runs is `training_step` itself, so its loss
must be a mean over the rows of the batch (`LossFunction`). A validation runs `validation_step` under the same plan.
Values that a step logs are averaged over the rows of the global batch.

A checkpoint file has the full weights as Lightning writes them. The folder `FILE.meshwright` next to it has the sharded
training state, which any plan continues. The file is replaced last and names the step in this folder, whose earlier
step is removed afterwards. So a file that exists is complete, also if a process is killed while it is replaced.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, RandomSampler

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.own_loop import parallelize
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, ZeroWeightBatch, num_rows
from meshwright.spec.plan import Plan

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning is published. A strategy must be of the package that the script imports."""


def _package() -> str:
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    raise InputError(Message("MeshwrightStrategy needs Lightning: pip install 'meshwright[lightning]'"))


LIGHTNING = _package()
DDPStrategy: Any = importlib.import_module(f"{LIGHTNING}.strategies").DDPStrategy
init_optimizers = importlib.import_module(f"{LIGHTNING}.core.optimizer")._init_optimizers_and_lr_schedulers
update_dataloader = importlib.import_module(f"{LIGHTNING}.utilities.data")._update_dataloader

FITTING = "fit"
PRECISIONS = {"32-true": "fp32", "64-true": "fp64", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""The precisions of Lightning that Meshwright has too."""
SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""The options of an optimizer that a schedule or a callback may change during training."""
STEP_KEY = "meshwright_step"
"""The key of a checkpoint file with the name of the step in the folder of the sharded training state."""
ENTRY, ROWS = "batch.", "rows"
"""The beginning of the names of a batch's entries, and the entry that numbers its rows."""


class LightningStep(nn.Module):
    """The model that is sharded: its forward is a step of the module, and returns the loss and what the step logs."""

    def __init__(self, module: Any, step: Callable[[], tuple[str, Any]], batch: Any) -> None:
        """`step`: returns the name of the method to run, and its arguments after the batch, such as the index of the
        batch. `batch`: a batch of the form of all others."""
        super().__init__()
        self.module, self.step = module, step
        self.form = type(batch) if isinstance(batch, Mapping | tuple | list) else None

    def forward(self, **entries: Any) -> dict[str, Any]:
        values = {name.removeprefix(ENTRY): value for name, value in entries.items() if name != ROWS}
        batch: Any = values
        if self.form is None:
            (batch,) = values.values()
        elif not issubclass(self.form, Mapping):
            batch = self.form(*values.values()) if hasattr(self.form, "_make") else self.form(values.values())
        logged: dict[str, Any] = {}
        with _recorded_logs(self.module, logged):
            name, given = self.step()
            output = getattr(self.module, name)(batch, *given)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and logged:
            loss = torch.as_tensor(next(iter(logged.values()))[0])
        return {"loss": loss, "logged": logged}


@contextmanager
def _recorded_logs(module: Any, logged: dict[str, Any]) -> Iterator[None]:
    def log(name: str, value: Any, *given: Any, **named: Any) -> None:
        logged[name] = (value.detach() if isinstance(value, torch.Tensor) else value, given, named)

    module.log = log
    try:
        yield
    finally:
        del module.log


def entries_of(batch: Any) -> Batch:
    """Returns the entries of a batch by name, and the numbers of its rows. The names are none that Meshwright knows,
    such as labels.

    Raises:
        InputError: The batch is neither a tensor nor a mapping, tuple or list of tensors.
    """
    values = batch if isinstance(batch, Mapping | tuple | list) else (batch,)
    named = values.items() if isinstance(values, Mapping) else enumerate(values)
    found = {f"{ENTRY}{name}": value for name, value in named}
    if not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise InputError(
            Message(
                "MeshwrightStrategy: a batch is a {type}; give a tensor, or a tuple, list or dict of tensors",
                type=type(batch).__name__,
            )
        )
    return {**found, ROWS: torch.arange(num_rows(found))}


class MeshwrightStrategy(DDPStrategy):
    """A strategy that trains under `plan`: a plan, its name, or 'auto' (mw.parallelize)."""

    strategy_name = "meshwright"

    def __init__(self, plan: Plan | str = "auto", options: Mapping[str, Any] | None = None, **named: Any) -> None:
        """`options`: further arguments of `mw.parallelize`, such as precision, seed or prove. The other arguments are
        those of `DDPStrategy`."""
        super().__init__(**named)
        self.plan, self.options = plan, dict(options or {})
        self.sharded: Any = None
        """The trainer of Meshwright once training has begun (`meshwright.train.trainer.Trainer`)."""
        self._step: tuple[str, Any] = ("training_step", ())
        self._resumed: Path | None = None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader, which reads all rows. A loader that shuffles without a generator of its own gets an order
        that is equal on all ranks."""
        sampler = getattr(dataloader, "sampler", None)
        if not isinstance(sampler, RandomSampler) or sampler.generator is not None:
            return dataloader
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return update_dataloader(dataloader, DistributedSampler(dataloader.dataset, 1, 0, seed=seed))

    # --- set-up

    def setup(self, trainer: Any) -> None:
        """Checks the trainer and makes its optimizer, whose options the schedules change."""
        if trainer.state.fn != FITTING or self.sharded is not None:
            if self.sharded is None:
                super().setup(trainer)
            return
        self._check(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # it would give each rank other rows
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.setup_optimizers(trainer)
        trainer.num_sanity_val_steps = 0  # the module is not on its device yet

    def _check(self, trainer: Any) -> None:
        wrong, accumulated = None, trainer.accumulate_grad_batches
        if accumulated > 1:
            wrong = Message(
                "accumulate_grad_batches is {steps}, but the plan divides the batch into micro-batches: set it to 1 "
                "and the batch size of the loader {steps} times as large",
                steps=accumulated,
            )
        elif not trainer.lightning_module.automatic_optimization:
            wrong = Message("manual optimization updates outside of the plan: set automatic_optimization to True")
        elif trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            wrong = Message("gradient_clip_algorithm='value' is not known: leave it out, which clips the norm")
        elif str(trainer.precision) not in PRECISIONS:
            wrong = Message(
                "precision {precision} is not known: choose one of {known}",
                precision=str(trainer.precision),
                known=", ".join(PRECISIONS),
            )
        if wrong is not None:
            raise InputError(Message("MeshwrightStrategy: {what}", what=wrong))

    def _new_optimizer(self) -> torch.optim.Optimizer:
        found, _ = init_optimizers(self.lightning_module)
        if len(found) != 1:
            raise InputError(
                Message(
                    "MeshwrightStrategy: configure_optimizers returns {count} optimizers; return one, with parameter "
                    "groups",
                    count=len(found),
                )
            )
        vars(found[0]).pop("step", None)  # a schedule counts the calls of this method
        made: torch.optim.Optimizer = found[0]
        return made

    def _shard(self, batch: Any) -> None:
        module, entries = self.lightning_module, entries_of(batch)
        trainer = module.trainer
        options = {
            "precision": PRECISIONS[str(trainer.precision)],
            "clip": trainer.gradient_clip_val or None,
            "loss": _loss_of,
            "example": entries,
            **self.options,
        }
        model = LightningStep(module, lambda: self._step, batch)
        self.sharded = parallelize(model, lambda _: self._new_optimizer(), self.plan, **options)
        for group in self.optimizers[0].param_groups:
            group["params"] = []  # the sharded weights have an optimizer of their own; this one has the learning rates
        if self._resumed is not None:
            self.sharded.load(self._resumed)

    # --- steps

    def training_step(self, batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        """Runs one step of Meshwright on the global batch. Returns its mean loss over rows."""
        self._step = ("training_step", given)
        if self.sharded is None:
            self._shard(batch)
        for group, wanted in zip(self.sharded.optimizer.param_groups, self.optimizers[0].param_groups, strict=True):
            group.update({name: wanted[name] for name in SCHEDULED if name in wanted})
        with self._logging(batch) as entries:
            record = self.sharded.step(entries)
        return torch.tensor(record.loss, device=self.root_device)

    def backward(self, closure_loss: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """The step has run the backward already."""
        return closure_loss

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *given: Any, **named: Any
    ) -> Any:
        """Runs `closure`, whose training step updates the weights. `optimizer` has no parameters."""
        found = closure()
        optimizer.step()  # counts the step for the schedules
        return found

    def validation_step(self, batch: Any, *given: Any, **named: Any) -> Any:
        """Runs `validation_step` of the module under the plan. Returns its mean over rows."""
        return self._evaluate("validation_step", batch, *given, **named)

    def test_step(self, batch: Any, *given: Any, **named: Any) -> Any:
        """Runs `test_step` of the module under the plan. Returns its mean over rows."""
        return self._evaluate("test_step", batch, *given, **named)

    def _evaluate(self, step: str, batch: Any, *given: Any, **named: Any) -> Any:
        if self.sharded is None:
            return getattr(super(), step)(batch, *given, **named)
        self._step = (step, given)
        with self._logging(batch) as entries:
            return torch.tensor(self.sharded.evaluate(entries), device=self.root_device)

    def predict_step(self, *given: Any, **named: Any) -> Any:
        """Predicts with the full model. Raises InputError once the module is sharded."""
        if self.sharded is not None:
            raise InputError(
                Message(
                    "MeshwrightStrategy: predict needs the full model: load the checkpoint with load_from_checkpoint"
                )
            )
        return super().predict_step(*given, **named)

    @contextmanager
    def _logging(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yields the entries of `batch`. Logs afterwards the means over its rows of what the passes of the step have
        logged. Of several passes of a row (checks, a proof), the last one counts."""
        objective, rows = self.sharded.engine.objective, num_rows(entries_of(batch))
        passes: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def recorded(output: Any, batch: Batch) -> torch.Tensor:
            if not isinstance(batch, ZeroWeightBatch):
                passes.append((batch[ROWS], output["logged"]))
            return own(output, batch)

        own, objective.applied_loss = objective.applied_loss, recorded
        try:
            yield entries_of(batch)
        finally:
            objective.applied_loss = own
        table: dict[str, dict[int, float]] = {}
        arguments: dict[str, Any] = {}
        for at, logged in passes:
            for name, (value, *arguments[name]) in logged.items():
                table.setdefault(name, {}).update(dict.fromkeys(at.tolist(), float(value)))
        for name, mean, (given, named) in _means_of_ranks(table, arguments):
            self.lightning_module.log(name, mean, *given, **{**named, "batch_size": rows, "sync_dist": False})

    # --- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the full weights by their names in the module, on rank 0. All ranks call it."""
        if self.sharded is None:
            return dict(super().lightning_module_state_dict())
        full = self.sharded.full_state_dict() or {}
        return {name.removeprefix("module."): value for name, value in full.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the sharded training state, then the file of Lightning, and removes the earlier training state of this
        file. All ranks call it."""
        if self.sharded is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        saved = self.sharded.save(_state_folder(filepath))
        super().save_checkpoint({**checkpoint, STEP_KEY: saved.name}, filepath, storage_options)
        if self.is_global_zero:
            for earlier in saved.parent.iterdir():
                if earlier.name != saved.name:
                    shutil.rmtree(earlier, ignore_errors=True)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the file of Lightning and the sharded training state."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_state_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """Reads the file of Lightning. The sharded training state is read when the module is sharded."""
        found = dict(super().load_checkpoint(checkpoint_path, *given, **named))
        self._resumed = _state_folder(checkpoint_path) / found.get(STEP_KEY, "")
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the options of the optimizer. Its states are in the sharded training state."""
        if self._resumed is None or not self._resumed.is_dir():
            raise InputError(
                Message(
                    "MeshwrightStrategy: the checkpoint has no folder {folder!r}, so the states of the optimizer are "
                    "missing: load only its weights with load_from_checkpoint, or continue with the strategy that "
                    "wrote it",
                    folder=str(self._resumed),
                )
            )
        (saved,) = checkpoint["optimizer_states"]
        for group, options in zip(self.optimizers[0].param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})

    def teardown(self) -> None:
        """Ends the run. The sharded weights stay on their device."""
        if self.sharded is None:
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _state_folder(file: Any) -> Path:
    """Returns the folder of the sharded training state of a checkpoint file, or of the file that it links to.

    Raises:
        InputError: The file is not on a file system of this machine.
    """
    if "://" in str(file):
        raise InputError(
            Message(
                "MeshwrightStrategy: the sharded training state needs a folder that all ranks see, but the checkpoint "
                "is {file}: give ModelCheckpoint the path of a shared file system",
                file=str(file),
            )
        )
    return Path(f"{Path(file).resolve()}.meshwright")


def _loss_of(output: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = output["loss"]
    return loss


def _means_of_ranks(
    table: Mapping[str, Mapping[int, float]], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, float, Any]]:
    """Yields each logged name with the mean of its values over the rows of all ranks, and the arguments of `log`.
    `table`: by name, the values of the rows of this rank."""
    everyone = gather_objects((table, arguments))
    for name in dict.fromkeys(name for each, _ in everyone for name in each):
        values: dict[int, float] = {}
        for each, _ in everyone:
            values.update(each.get(name, {}))
        yield name, sum(values.values()) / len(values), next(given[name] for _, given in everyone if name in given)
