"""The Trainer of transformers under a plan (test_lightning.py: Lightning)."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, as_torchrun_starts, block_of_page

from meshwright.core.errors import InputError

transformers = pytest.importorskip("transformers")
AcceleratorState = pytest.importorskip("accelerate.state").AcceleratorState
WORDS, LENGTH, ROWS = 64, 8, 24


class Rows(torch.utils.data.Dataset):
    """Token ids, and labels of which some are left out: unequal numbers in the rows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


class Losses(transformers.TrainerCallback):
    """The logged losses, learning rates and gradient norms. Ends the run as if it were killed after step `stop`."""

    def __init__(self, stop: int = 0) -> None:
        self.found: list[tuple[float, float, float]] = []
        self.validation: list[float] = []
        self.stop = stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" in logs:
            self.found.append((logs["loss"], logs["learning_rate"], float(logs["grad_norm"])))
        if "eval_loss" in logs:
            self.validation.append(logs["eval_loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        control.should_training_stop |= state.global_step == self.stop
        return control


def arguments(folder: str, rows: int, **more: Any) -> Any:
    return transformers.TrainingArguments(
        folder, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, num_train_epochs=2, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, save_steps=2, seed=3, data_seed=3,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_nan_inf_filter=False,
        **{"save_strategy": "steps", "eval_strategy": "epoch", **more},
    )  # fmt: skip


def with_trainer(folder: str, plan: str, rows: int, dtype: torch.dtype, stop: int = 0) -> Any:
    """Losses of a run, validation losses, what the proof said, and the plan."""
    AcceleratorState._reset_state(True)
    try:
        with as_torchrun_starts():
            return trained(folder, plan, rows, dtype, stop)
    finally:
        AcceleratorState._reset_state(True)


def trained(folder: str, plan: str, rows: int, dtype: torch.dtype, stop: int) -> Any:
    from meshwright.adapters.huggingface import MeshwrightTrainer

    losses, options = Losses(stop), {"precision": "fp64" if dtype == torch.float64 else "fp32", "prove": "start"}
    trainer = MeshwrightTrainer(
        llama(dtype), arguments(folder, rows), train_dataset=Rows(), eval_dataset=Rows(), callbacks=[losses],
        plan=plan, options=options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    return losses.found, losses.validation, trainer.sharded.prover.last, trainer.sharded.plan.name


def plain(folder: str, dtype: torch.dtype) -> tuple[list[tuple[float, float, float]], list[float], Any]:
    """The same with the Trainer of transformers on one device."""
    losses = Losses()
    trainer = transformers.Trainer(
        llama(dtype), arguments(folder, 8, save_strategy="no"), train_dataset=Rows(), eval_dataset=Rows(),
        callbacks=[losses],
    )  # fmt: skip
    trainer.train()
    return losses.found, losses.validation, trainer.model.state_dict()


@pytest.mark.parametrize(
    ("plan", "world", "dtype", "close"),
    [
        ("ddp", 2, torch.float64, 1e-10),
        ("fsdp", 2, torch.float32, 2e-5),
        ("tp2", 2, torch.float64, 1e-10),
        ("pp2", 2, torch.float64, 1e-10),
        ("auto", 2, torch.float32, 2e-5),
        ("dp1", 1, torch.float64, 1e-10),
    ],
)
@pytest.mark.covering(2)
def test_trainer_under_a_plan_equals_trainer_on_one_device(
    ranks: Pool, tmp_path: Path, plan: str, world: int, dtype: torch.dtype, close: float
) -> None:
    expected, validation, weights = plain(str(tmp_path / "plain"), dtype)
    for found, after, proof, _ in ranks.run(
        world, partial(with_trainer, str(tmp_path / "run"), plan, 8 // world, dtype)
    ):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=max(close, 2e-6))  # transformers sums and logs losses in float32
        assert after == pytest.approx(validation, rel=1e-2) and (world == 1 or proof.equal)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run", dtype=dtype).state_dict()
    for name, value in weights.items():
        # transformers computes the cross-entropy of logits in float32, also for a model in float64
        assert torch.allclose(saved[name], value, rtol=2e-5, atol=2e-5), name


@pytest.mark.soak
def test_a_run_that_ends_goes_on_from_its_newest_complete_checkpoint_under_another_plan(
    ranks: Pool, tmp_path: Path
) -> None:
    expected, _, _ = plain(str(tmp_path / "plain"), torch.float64)
    folder = str(tmp_path / "run")
    first = ranks.run(2, partial(with_trainer, folder, "fsdp", 4, torch.float64, 3))[0][0]
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "checkpoint-3")
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").unlink()  # killed while it wrote this checkpoint
    second = ranks.run(2, partial(with_trainer, folder, "pp2", 4, torch.float64))[0][0]
    assert [*first[:2], *second] == [pytest.approx(each, rel=2e-6) for each in expected]


def from_the_page(folder: str) -> list[float]:
    """Runs the block of the page and returns the losses of its trainer."""
    AcceleratorState._reset_state(True)
    try:
        with as_torchrun_starts():
            args = arguments(folder, 4, save_strategy="no", eval_strategy="no")
            names: dict[str, Any] = {"model": llama(torch.float32), "args": args, "dataset": Rows()}
            exec(block_of_page("huggingface.md", "MeshwrightTrainer("), names)
            return [each["loss"] for each in names["trainer"].state.log_history if "loss" in each]
    finally:
        AcceleratorState._reset_state(True)


def test_the_block_of_the_page_trains(ranks: Pool, tmp_path: Path) -> None:
    expected = [loss for loss, *_ in plain(str(tmp_path / "plain"), torch.float32)[0]]
    assert ranks.run(2, from_the_page, str(tmp_path)) == [pytest.approx(expected, rel=2e-5)] * 2


@pytest.mark.parametrize(
    ("more", "given", "line"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "set it to 1 and per_device_train_batch_size to 16"),
        ({}, {"compute_loss_func": lambda *given: None}, "options={'loss': "),
        ({}, {"compute_metrics": lambda found: {}}, "compute_metrics needs the logits"),
    ],
)
def test_what_trainer_asks_for_and_a_plan_does_ends_in_one_line(
    tmp_path: Path, more: dict[str, Any], given: dict[str, Any], line: str
) -> None:
    from meshwright.adapters.huggingface import MeshwrightTrainer

    with pytest.raises(InputError, match="MeshwrightTrainer: ") as refused:
        MeshwrightTrainer(
            llama(torch.float32),
            arguments(str(tmp_path), 8, **more),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            **given,
        )
    assert line in str(refused.value) and "\n" not in str(refused.value)
