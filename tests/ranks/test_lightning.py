"""Lightning under a plan: the strategy of Meshwright, and Lightning on one device."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, as_torchrun_starts, block_of_page
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError

lightning = pytest.importorskip("lightning.pytorch")
WORDS, LENGTH, ROWS, WIDTH = 64, 8, 24, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Module(lightning.LightningModule):
    """A module as a user of Lightning writes it: the loss in training_step, a schedule, logs and a validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, prog_bar=True)
        self.log("right", (logits.argmax(-1) == batch["labels"]).double().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["ids"])
        self.log_dict(
            {
                "val_loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()),
                "val_right": (logits.argmax(-1) == batch["labels"]).double().mean(),
            }
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids[:-1], "labels": ids[1:]}


class Seen(lightning.Callback):
    """What callbacks see after each step and each validation."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []
        self.validations: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *given: Any) -> None:
        found = trainer.callback_metrics
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((float(outputs["loss"]), float(found["loss"]), float(found["right"]), rate))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(tuple(float(trainer.callback_metrics[name]) for name in ("val_loss", "val_right")))


def fit(
    folder: str, epochs: int, strategy: Any, precision: str = "64-true", clip: float | None = 0.5, **more: Any
) -> tuple[Any, Seen]:
    seen = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises on workers, loggers and folders
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, precision=precision, max_epochs=epochs, gradient_clip_val=clip,
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[seen, lightning.callbacks.ModelCheckpoint(folder, save_last=True)], **more,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(Rows(), batch_size=8)
        trainer.fit(Module(), loader, loader, ckpt_path="last")
    return trainer, seen


def plain(folder: str, epochs: int, precision: str = "64-true", **more: Any) -> tuple[Seen, dict[str, Any]]:
    trainer, seen = fit(folder, epochs, "auto", precision, devices=1, **more)
    return seen, trainer.lightning_module.state_dict()


def planned(folder: str, epochs: int, plan: str, world: int, precision: str = "64-true") -> Any:
    """What callbacks see, what the proof said, and the plan."""
    from meshwright.adapters.lightning import MeshwrightStrategy

    with as_torchrun_starts():
        strategy = MeshwrightStrategy(plan, {"prove": "start"})
        _, seen = fit(folder, epochs, strategy, precision, devices=world)
    return seen.steps, seen.validations, strategy.sharded.prover.last, strategy.sharded.plan.name


@pytest.mark.parametrize(
    ("plan", "world", "precision", "close"),
    [
        ("dp2.z3", 2, "64-true", 1e-10),
        ("tp2", 2, "64-true", 1e-10),
        ("pp2", 2, "64-true", 1e-10),
        ("auto", 2, "32-true", 2e-5),
        ("ddp", 2, "64-true", 1e-10),
        ("dp1", 1, "64-true", 1e-10),
    ],
)
@pytest.mark.covering(2)
def test_lightning_under_a_plan_equals_lightning_on_one_device(
    ranks: Pool, tmp_path: Path, plan: str, world: int, precision: str, close: float
) -> None:
    expected, weights = plain(str(tmp_path / "plain"), 2, precision)
    for steps, validations, proof, _ in ranks.run(
        world, partial(planned, str(tmp_path / "run"), 2, plan, world, precision)
    ):
        for one, other in zip(steps, expected.steps, strict=True):
            assert one == pytest.approx(other, rel=max(close, 1e-6))  # Lightning stores losses in float32
        for one, other in zip(validations, expected.validations, strict=True):
            assert one == pytest.approx(other, rel=max(close, 1e-6))
        assert world == 1 or proof.equal
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    Module().load_state_dict(saved)  # strict: the names of the module, and all of them
    for name, value in weights.items():
        assert torch.allclose(saved[name], value, rtol=close, atol=close), name


def test_a_run_that_ends_goes_on_from_its_last_checkpoint_under_another_plan(ranks: Pool, tmp_path: Path) -> None:
    expected, _ = plain(str(tmp_path / "plain"), 2)
    folder = str(tmp_path / "run")
    first = ranks.run(2, partial(planned, folder, 1, "fsdp", 2))[0][0]
    (tmp_path / "run" / "epoch=1-step=6.ckpt.meshwright").mkdir()  # killed while it wrote this checkpoint
    (tmp_path / "run" / "last.ckpt.meshwright" / "step-00000009").mkdir()  # killed before it replaced last.ckpt
    second = ranks.run(2, partial(planned, folder, 2, "pp2", 2))[0][0]
    assert [*first, *second] == [pytest.approx(each, rel=1e-6) for each in expected.steps]
    assert {path.name for path in (tmp_path / "run").glob("*.meshwright")} == {
        f"{path.name}.meshwright" for path in (tmp_path / "run").glob("*.ckpt")
    }
    (tmp_path / "run" / "last.ckpt.meshwright").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="has no folder"), as_torchrun_starts():
        planned(folder, 3, "dp1", 1)


def from_the_page(folder: str) -> list[float]:
    """Runs the block of the page and returns the losses of its trainer."""
    with as_torchrun_starts(), contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"module": Module(), "loader": torch.utils.data.DataLoader(Rows(), batch_size=8)}
        exec(block_of_page("runtime.md", "MeshwrightStrategy("), names)
        return [float(names["trainer"].callback_metrics["loss"])]


def test_the_block_of_the_page_trains(ranks: Pool, tmp_path: Path) -> None:
    losses = ranks.run(2, from_the_page, str(tmp_path))
    expected, _ = plain(str(tmp_path / "plain"), 3, "32-true", clip=None)
    assert losses == [[pytest.approx(expected.steps[-1][0], rel=2e-5)]] * 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"accumulate_grad_batches": 2}, "set it to 1 and the batch size of the loader 2 times as large"),
        ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value' is not known"),
        ({"precision": "bf16-true"}, "precision bf16-true is not known: choose one of 32-true"),
    ],
)
def test_what_a_plan_does_or_cannot_do_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    from meshwright.adapters.lightning import MeshwrightStrategy

    with pytest.raises(InputError, match="MeshwrightStrategy: ") as refused:
        fit(str(tmp_path), 1, MeshwrightStrategy("dp1"), **{"precision": "32-true", "devices": 1, **change})
    assert line in str(refused.value) and "\n" not in str(refused.value)
