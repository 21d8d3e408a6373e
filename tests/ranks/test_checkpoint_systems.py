"""A run begun in another system goes on here, and back, with the losses of one device."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equality import TOLERANCE, alone, anatomy_of, loss_of, make_batch, make_model, make_optimizer
from pool import unchecked
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.checkpoint.formats.detect import open_checkpoint
from meshwright.checkpoint.formats.export import export_checkpoint
from meshwright.checkpoint.load import read_full_tensor
from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "checkpoint_systems.md"
STEPS, STOP = 5, 3
"""Steps of every run, and the steps before it changes its system."""


class Fsdp2:
    """A training loop of plain torch: FSDP2, its own optimizer, a global mean over the labels."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, make_model(name).double()
        for module in [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]:
            for block in module:
                fully_shard(block)
        fully_shard(self.model)
        self.optimizer = make_optimizer(self.model.parameters())

    def run(self, first: int, last: int) -> list[float]:
        rank, world, losses = dist.get_rank(), dist.get_world_size(), []
        for step in range(first, last):
            batch = make_batch(self.name, step)
            rows = {key: value.chunk(world)[rank] for key, value in batch.items()}
            total = sum(int((row != -100).sum()) for row in self._labels(batch))
            count = sum(int((row != -100).sum()) for row in self._labels(rows))
            self.optimizer.zero_grad()
            loss = self._sum(rows, count) * world / total
            loss.backward()
            self.optimizer.step()
            shown = loss.detach() / world
            dist.all_reduce(shown)
            losses.append(float(shown))
        return losses

    def _labels(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["labels"][:, 1:]

    def _sum(self, rows: dict[str, torch.Tensor], count: int) -> torch.Tensor:
        return loss_of(self.model, self.name, rows)[0] * count

    def state(self, form: str) -> dict[str, Any]:
        """The state dict in the form of the tutorial of DCP ('nested'), or as torchtitan flattens it ('flat')."""
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        model = get_model_state_dict(self.model)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer} if form == "nested" else {**model, "optimizer": optimizer}


def save_fsdp2(name: str, form: str, folder: str) -> None:
    loop = Fsdp2(name)
    loop.run(0, STOP)
    state = loop.state(form)
    if form == "flat":
        state |= {"train_state": {"step": torch.tensor(STOP)}, "lr_scheduler": {"last_epoch": STOP}}
    dcp.save(state, checkpoint_id=folder)


def load_fsdp2(name: str, folder: str) -> list[float]:
    loop = Fsdp2(name)
    state = loop.state("nested")
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loop.model, state["model"])
    set_optimizer_state_dict(loop.model, loop.optimizer, state["optimizer"])
    return loop.run(STOP, STEPS)


def deepspeed_steps(name: str, stage: int, folder: str, load: bool) -> list[float]:
    """The losses of DeepSpeed at ZeRO `stage`: of the first steps, saved to `folder`, or of those after its load."""
    import deepspeed

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    warnings.simplefilter("ignore")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile an extension
    deepspeed.init_distributed("gloo")
    model = make_model(name)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": load},
    }
    optimizer = make_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if load:
        engine.load_checkpoint(folder)
        assert engine.global_steps == STOP
    losses = []
    for step in range(STOP, STEPS) if load else range(STOP):
        batch, world = make_batch(name, step), dist.get_world_size()
        rows = {key: value.chunk(world)[dist.get_rank()] for key, value in batch.items()}
        share = int((rows["labels"][:, 1:] != -100).sum()) / int((batch["labels"][:, 1:] != -100).sum())
        loss = loss_of(engine, name, rows)[0] * share * world
        engine.backward(loss)
        engine.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        losses.append(float(shown))
    if not load:
        engine.save_checkpoint(folder)
    return losses


def go_on(name: str, plan: str, path: str, precision: str = "fp64") -> tuple[list[float], list[float], int]:
    """The losses after the checkpoint at `path`, the numbers of updates of the optimizer, and the step."""
    trainer = parallelize(make_model(name), make_optimizer, plan, precision=precision, anatomy=anatomy_of(name))
    trainer.load(path)
    step = trainer.steps
    losses = [trainer.step(make_batch(name, at)).loss for at in range(step, STEPS)]
    return losses, sorted({float(one["step"]) for one in trainer.optimizer.state.values()}), step


def train_and_save(name: str, plan: str, folder: str, precision: str = "fp64") -> None:
    trainer = parallelize(make_model(name), make_optimizer, plan, precision=precision, anatomy=anatomy_of(name))
    for step in range(STOP):
        trainer.step(make_batch(name, step))
    trainer.save(folder)


ROWS: list[tuple[str, ...]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Writes the losses, if the systems are installed (`make systems`)."""
    yield
    if any("DeepSpeed" in row[0] for row in ROWS):
        heads = (
            "from",
            "to",
            "model",
            "precision",
            f"losses of steps {STOP + 1} to {STEPS}",
            "one device",
            "difference",
        )
        lines = ["| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *ROWS)]
        title = f"# Runs that change the system after step {STOP}\n\nWritten by `make systems`.\n\n"
        RESULTS.write_text(title + "\n".join(lines) + "\n")


def assert_losses(found: list[float], name: str, way: tuple[str, str], precision: str = "fp64") -> None:
    limit, expected = TOLERANCE[precision][0], alone(name, precision, STEPS, None)["losses"][STOP:]
    worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    shown = (", ".join(f"{loss:.9f}" for loss in losses) for losses in (found, expected))
    ROWS.append((*way, name, precision, *shown, f"{worst:.1e}"))
    assert worst <= limit, (found, expected)


FROM_FSDP2 = [
    ("llama", "nested", ("dp2.z3", "tp2")),
    pytest.param("llama-tied", "nested", ("pp2", "dp2.z1"), marks=pytest.mark.soak),
    pytest.param("hf-llama", "flat", ("dp2.tp2.z2", "pp2.interleaved2"), marks=pytest.mark.soak),
    pytest.param("hf-gpt2", "flat", ("tp2", "dp2.z2"), marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("name", "form", "plans"), FROM_FSDP2)
def test_a_run_begun_with_fsdp2_goes_on_here_under_two_plans(
    ranks: Any, tmp_path: Path, name: str, form: str, plans: tuple[str, ...]
) -> None:
    ranks.run(2, save_fsdp2, name, form, str(tmp_path / "dcp"))
    for plan in plans:
        losses, updates, step = ranks.run(parse_plan(plan).world, go_on, name, plan, str(tmp_path / "dcp"))[0]
        assert_losses(losses, name, ("FSDP2, DCP", f"`{plan}`"))
        assert updates == [STEPS] and step == STOP


@pytest.mark.parametrize(
    ("name", "plan"),
    [("llama", "tp2"), ("llama-tied", "dp2.z3"), pytest.param("hf-gpt2", "dp2.pp2.z2", marks=pytest.mark.soak)],
)
def test_a_run_begun_here_goes_on_with_fsdp2(ranks: Any, tmp_path: Path, name: str, plan: str) -> None:
    ranks.run(parse_plan(plan).world, train_and_save, name, plan, str(tmp_path))
    export_checkpoint(tmp_path / f"step-{STOP:08d}", tmp_path / "dcp", "dcp")
    found = ranks.run(2, load_fsdp2, name, str(tmp_path / "dcp"))[0]
    assert_losses(found, name, (f"`{plan}`", "FSDP2, DCP"))


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_begun_with_deepspeed_goes_on_here_and_back(ranks: Any, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    ranks.close()  # DeepSpeed retains the process group of its first call
    ranks.run(2, unchecked, deepspeed_steps, "llama", stage, str(tmp_path / "zero"), False)
    ranks.close()
    for plan in ("tp2", "dp2.z3"):
        losses, updates, step = ranks.run(2, go_on, "llama", plan, str(tmp_path / "zero"), "fp32")[0]
        assert_losses(losses, "llama", (f"DeepSpeed, ZeRO {stage}", f"`{plan}`"), "fp32")
        assert updates == [STEPS] and step == STOP
    ranks.run(2, train_and_save, "llama", "tp2", str(tmp_path / "ours"), "fp32")
    export_checkpoint(tmp_path / "ours" / f"step-{STOP:08d}", tmp_path / "universal", "deepspeed")
    ranks.close()
    back = ranks.run(2, unchecked, deepspeed_steps, "llama", stage, str(tmp_path / "universal"), True)[0]
    ranks.close()
    assert_losses(back, "llama", ("`tp2`", f"DeepSpeed, ZeRO {stage}, universal"), "fp32")


def grouped(given: Any) -> torch.optim.Optimizer:
    matrices, others = (
        [one for one in given if getattr(one, "is_matrix", one.ndim > 1) is kind] for kind in (True, False)
    )
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def save_grouped(plan: str, folder: str) -> None:
    make = lambda given: grouped(list(given))
    trainer = parallelize(make_model("llama"), make, plan, precision="fp64", anatomy=anatomy_of("llama"))
    trainer.step(make_batch("llama", 0))
    trainer.save(folder)


def test_the_parameter_groups_of_an_export_are_those_of_the_run(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, save_grouped, "dp2.z3", str(tmp_path))
    content = export_checkpoint(tmp_path / "step-00000001", tmp_path / "dcp", "dcp")
    decayed, rest = content.groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    shapes = {name: one.ndim for name, one in make_model("llama").named_parameters()}
    assert set(decayed["params"]) == {name for name, dims in shapes.items() if dims > 1}
    assert set(rest["params"]) == {name for name, dims in shapes.items() if dims == 1}


def save_boxes(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = {name: torch.arange(30.0 + rows).view(-1, 1) + torch.arange(7.0) for name, rows in (("a", 0), ("b", 1))}
    places = {"a": (Shard(0), Shard(1)), "b": (Shard(1), Replicate())}
    dcp.save(
        {"model": {key: distribute_tensor(one, mesh, places[key]) for key, one in full.items()}}, checkpoint_id=folder
    )


def test_tensors_stored_as_boxes_are_assembled(ranks: Any, tmp_path: Path) -> None:
    ranks.run(4, save_boxes, str(tmp_path / "dcp"))
    source = open_checkpoint(tmp_path / "dcp")
    for name, rows in (("a", 30), ("b", 31)):
        full = torch.arange(float(rows)).view(-1, 1) + torch.arange(7.0)
        assert torch.equal(read_full_tensor(source, f"model/{name}"), full)


def test_a_checkpoint_of_another_model_or_optimizer_is_one_line_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    ranks.run(2, save_fsdp2, "llama", "nested", str(folder))
    for line in ranks.run(2, refused, "gpt2", False, str(folder)):
        assert "tensors that this model does not have, the first is" in line and "\n" not in line
    for line in ranks.run(2, refused, "llama", True, str(folder)):
        assert "has the optimizer states exp_avg, exp_avg_sq, but SGD of this job has momentum_buffer" in line


def refused(name: str, sgd: bool, path: str) -> str:
    make = (lambda given: torch.optim.SGD(given, 0.1, momentum=0.9)) if sgd else make_optimizer
    trainer = parallelize(make_model(name), make, "dp2", precision="fp64", anatomy=anatomy_of(name))
    with pytest.raises(InputError) as caught:
        trainer.load(path)
    return str(caught.value)
