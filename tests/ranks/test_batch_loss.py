"""A loss that compares the rows of the whole batch (CLIP), under data parallelism: `gather="batch"`."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from test_coming_from import ROOT, refresh, run_script
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.analysis.profile.model_spec import describe
from meshwright.core.errors import InputError
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.spec.job import Job

WIDTH, WORDS, LENGTH, PIXELS, ROWS = 16, 40, 6, 24, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Clip(nn.Module):
    """Two encoders and a temperature. `coupled`: whether the model itself centres its rows."""

    def __init__(self, coupled: bool = False) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(WORDS, WIDTH), nn.Linear(PIXELS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))
        self.coupled = coupled

    def forward(self, input_ids: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
        text, picture = self.words(input_ids), self.pixels(image)[:, None]
        x = torch.cat([text, picture], 1)
        for layer in self.layers:
            x = layer(x)
        x = x - x.mean(0, keepdim=True) if self.coupled else x
        return {
            "text": F.normalize(x[:, :-1].mean(1), dim=-1),
            "image": F.normalize(x[:, -1], dim=-1),
            "scale": self.logit_scale.exp(),
        }


def contrast(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """The symmetric cross-entropy of CLIP. Rows with equal `group` count as one match."""
    logits = output["scale"] * output["image"] @ output["text"].T
    match = (batch["group"][:, None] == batch["group"]).to(logits)
    match = match / match.sum(1, keepdim=True)
    return (F.cross_entropy(logits, match) + F.cross_entropy(logits.T, match)) / 2


def batch_of(step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {
        "input_ids": torch.randint(0, WORDS, (rows, LENGTH), generator=random),
        "image": torch.randn(rows, PIXELS, generator=random, dtype=torch.float64),
        "group": torch.randint(0, 5, (rows,), generator=random),
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def made(coupled: bool = False) -> Clip:
    torch.manual_seed(0)
    return Clip(coupled).double()


SIZES = (ROWS, ROWS, ROWS - 3)
"""Rows of the steps. The last batch is that of the end of an epoch."""


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three steps on one device, and the gradients before the first."""
    model, losses, gradients = made(), [], dict[str, torch.Tensor]()
    optimizer = adamw(model.parameters())
    for step, rows in enumerate(SIZES):
        batch = batch_of(step, rows)
        optimizer.zero_grad()
        loss = contrast(model(batch["input_ids"], batch["image"]), batch)
        loss.backward()
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def trained(plan: str, sizes: tuple[int, ...] = SIZES, coupled: bool = False, **options: Any) -> Any:
    """Losses, gradients and what a proof said; or the line of an error."""
    options = {"example": batch_of(0), "gather": "batch", "loss": contrast, "precision": "fp64", **options}
    try:
        trainer = mw.parallelize(made(coupled), adamw, plan, **options)
        gradients = trainer.gradients(batch_of(0))[2]
        losses = [trainer.step(batch_of(step, rows)).loss for step, rows in enumerate(sizes)]
        return losses, gradients, trainer.prover.last and trainer.prover.last.equal, trainer.evaluate(batch_of(0))
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("plan", "world"),
    [("dp1", 1), ("dp2", 2), ("dp2.z3", 2), ("dp2x2.z1", 4), ("dp2.z2.tp2", 4), ("dp4.z3", 4), ("dp2.z1.rc-full", 2)],
)
@pytest.mark.covering(3)
def test_a_contrastive_loss_and_its_gradients_equal_one_device(ranks: Pool, plan: str, world: int) -> None:
    expected, gradients = alone()
    for losses, found, equal, after in ranks.run(world, partial(trained, plan, prove="start")):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert after < losses[0] and (equal or world == 1)
        for name, value in (found or {}).items():
            assert torch.allclose(value, gradients[name], rtol=1e-10, atol=1e-12), name


def test_rows_that_depend_on_each_other_inside_the_model_are_refused(ranks: Pool) -> None:
    (line, other) = ranks.run(2, trained, "dp2", (ROWS,), True)
    assert line == other and "rows of a batch depend on each other" in line and "gather" not in line, line


def test_a_contrastive_loss_without_gather_is_refused_by_a_line_that_names_it(ranks: Pool) -> None:
    for line in ranks.run(2, partial(trained, "dp2", gather=None)):
        assert "rows of a batch depend on each other" in line and "or gather='batch' for" in line, line


FORWARD = {name: value for name, value in batch_of(0).items() if name != "group"}


@pytest.mark.parametrize(
    ("plan", "options", "line"),
    [
        ("dp2.mb2", {}, r"needs all rows at once, but this batch has 2 micro-batches per replica: use mb4"),
        ("pp2", {}, "plan pp2: with gather='batch' .* use dp2 with z1, z2 or z3, without pp, ga and DiLoCo"),
        ("dp2", {"gather": "bacth"}, r"gather='bacth' is unknown: give gather='batch'"),
        ("dp2", {"loss": None, "example": FORWARD}, "give loss=function"),
    ],
)
def test_what_gather_cannot_do_ends_in_one_line(ranks: Pool, plan: str, options: dict[str, Any], line: str) -> None:
    for said in ranks.run(2, partial(trained, plan, (ROWS,), **options)):
        assert isinstance(said, str) and re.search(line, said) and "\n" not in said, said


def test_the_example_of_the_page_trains_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "en" / "runtime.md").read_text(encoding="utf-8")
    (script,) = [block.text for block in refresh["blocks"](page) if 'gather="batch"' in block.text]
    assert script in (ROOT / "docs" / "zh" / "runtime.md").read_text(encoding="utf-8")
    (both, alone) = [ranks.run(world, run_script, str(tmp_path), script)[0] for world in (2, 1)]
    assert both == alone and float(both.split()[-1]) < 1.0


def chosen(gather: str | None) -> str:
    trainer = mw.parallelize(made(), adamw, "auto", example=batch_of(0), precision="fp64", loss=contrast, gather=gather)
    return trainer.plan.name


def test_auto_chooses_a_plan_with_one_micro_batch_on_data_ranks(ranks: Pool) -> None:
    name, other = ranks.run(2, chosen, "batch")
    plan = mw.parse_plan(name)
    assert name == other and (plan.pp, plan.cp) == (1, 1) and plan.micro_batch * plan.dp == ROWS, name


def test_the_planner_prices_the_gather_of_the_outputs() -> None:
    spec = describe(made, LENGTH, FORWARD, precision="fp64", gather=True)
    assert spec.gathered == 2 * WIDTH
    rows = 2**18
    job = Job.model_validate(
        {"model": spec, "cluster": read_cluster("1x8:a100-80gb"), "workload": {"batch": rows, "sequence": LENGTH}}
    )
    plan, free = mw.parse_plan(f"dp8.mb{rows // 8}"), job.but(model=spec.but(gathered=0))
    added = mw.estimate(job, plan).time.data - mw.estimate(free, plan).time.data
    link, size = job.cluster.groups[0].link, 4 * rows * spec.gathered
    ring = size * 7 / 8 / (link.bandwidth * link.efficiency)  # an all-gather in fp32 on 8 ranks, without its latency
    assert ring < added < 3 * ring
    assert mw.simulate(job, plan).seconds == pytest.approx(mw.simulate(free, plan).seconds + added)
    with pytest.raises(InputError, match="with gather='batch' a replica has one micro-batch and no pipeline stages"):
        mw.estimate(job, mw.parse_plan("dp8.mb1"))
    assert all(each.plan.pp == 1 and each.plan.micro_batch * each.plan.dp == rows for each in mw.plan(job, 5))
