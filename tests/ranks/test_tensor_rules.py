"""A rule that a person writes for layers that were not understood: proven with numbers, then equal to one device, or
refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality import VOCABULARY, make_batch, make_optimizer
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.declared_regions import USER_RULES_ATTRIBUTE
from meshwright.cli.launch_plan import build_model_source
from meshwright.core.errors import InputError
from meshwright.planner.inputs.job import read_job
from meshwright.spec.model import TpRule
from meshwright.train.trainer import parallelize


class Block(nn.Module):
    """Its features are turned round and back, which nobody follows; `mixes`: each then reads all of them."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.mixes = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x)).flip(-1).relu().flip(-1)
        return x + self.down(h + h.mean(-1, keepdim=True) if self.mixes else h)


class Model(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block(mixes) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ruled(columns: str, rows: str, mixes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Model(mixes)
    setattr(model, USER_RULES_ATTRIBUTE, (TpRule(columns=(columns,), rows=(rows,)),))
    return model


def trained(plan: str) -> tuple[float, float, int]:
    trainer = parallelize(ruled("up", "down"), make_optimizer, plan, precision="fp64")
    losses = [trainer.step(make_batch("llama", step)).loss for step in range(2)]
    held = max(
        parameter.numel()
        for unit in trainer.engine.zero.units
        for name, parameter in unit.parameters.items()
        if "up.weight" in name
    )
    trainer.close()
    return (*losses, held)  # type: ignore[return-value]


def test_layers_that_a_rule_names_are_cut_and_compute_what_one_device_does(ranks: Any) -> None:
    assert not analyze_model(Model()).regions
    one, two = ranks.run(1, trained, "dp1")[0], ranks.run(2, trained, "tp2")[0]
    assert one[:2] == pytest.approx(two[:2], rel=1e-10) and one[2] == 2 * two[2] == 512


def test_a_rule_that_is_wrong_is_one_line() -> None:
    for model, words in (
        (
            ruled("upp", "down"),
            r"model.rules\[0\].columns: 'upp' is not a layer of the block layers.0; did you mean 'up'",
        ),
        (ruled("up", "norm"), "layers.0.norm is a LayerNorm, not a linear layer"),
        (ruled("down", "down"), "layers.0.down reads 32 features, but layers.0.down gives 16"),
        (
            ruled("up", "down", mixes=True),
            r"model.rules\[0\]: layers.0.up cannot be sharded in this way: on 2 tensor ranks the output of "
            r"layers.0.down differs from the full run by 6.9e-02 when summed over ranks; leave",
        ),
    ):
        with pytest.raises(InputError, match=words) as caught:
            analyze_model(model)
        assert "\n" not in str(caught.value)


def test_a_job_file_carries_rules_to_the_ranks(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {module: 'mine:net', rules: [{columns: [up], rows: [down]}]}\n")
    assert build_model_source(read_job(job)).rules == (TpRule(columns=("up",), rows=("down",)),)
    job.write_text("model: {module: 'mine:net', rules: [{columns: [up]}]}\n")
    with pytest.raises(InputError, match=r"rules\[0\]"):
        read_job(job)
