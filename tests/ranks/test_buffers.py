"""Buffers of the saved state (running means and variances) are those of one device, whole, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.checkpoint.huggingface import export_weights
from meshwright.models.convnet import ConvNet, ConvNetConfig
from meshwright.spec.plan import parse_plan
from meshwright.train.meta_init import init_on_meta
from meshwright.train.trainer import parallelize

STEPS = 3


class Net(ConvNet):
    """Batch norms in front of the blocks, inside and behind them; two of them have no weights of their own, and one
    weight has two names."""

    def __init__(self) -> None:
        super().__init__(ConvNetConfig(layers=4, hidden=8, classes=10, batch_norm=True))
        self.last = nn.BatchNorm2d(8, affine=False)
        self.early = nn.BatchNorm2d(3, affine=False)
        for block in self.blocks:
            block.norm1.momentum = 0.3
        self.blocks[3].conv2.weight = self.blocks[3].conv1.weight

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = torch.relu(self.norm(self.stem(self.early(images))))
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.last(x).mean(dim=(2, 3)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {"images": torch.randn(8, 3, 8, 8, generator=random), "labels": torch.randint(0, 10, (8,), generator=random)}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def alone(steps: int) -> dict[str, torch.Tensor]:
    model = build().double()
    rule = optimizer(model.parameters())
    for step in range(steps):
        rule.zero_grad()
        nn.functional.cross_entropy(model(batch(step)["images"].double()), batch(step)["labels"]).backward()
        rule.step()
    return model.state_dict()


def trained(
    plan: str, folder: str, start: str = "", weights: str = "", steps: int = STEPS
) -> dict[str, torch.Tensor] | None:
    """On every rank: the state dict after `steps`, saved in `folder`; from the checkpoint `start`, or from the
    safetensors `weights`."""
    if weights:
        with init_on_meta():
            model = build()
    else:
        model = build()
    trainer = parallelize(model, optimizer, plan, precision="fp64")
    if start:
        trainer.load(start)
    if weights:
        trainer.load_weights(weights)
    for step in range(trainer.steps, steps):
        trainer.step(batch(step))
    if folder:
        trainer.save(folder)
    return trainer.full_state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


PLANS = [
    "dp1.mb8.rc-full",
    *(
        pytest.param(plan, marks=pytest.mark.soak)
        for plan in ("tp2.mb8", "pp2.mb8", "pp2.mb8.zbv", "tp2.pp2.mb8.rc-full")
    ),
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_state_dict_of_a_run_is_that_of_one_device_whole(ranks: Any, tmp_path: Path, plan: str) -> None:
    world, expected = parse_plan(plan).world, alone(STEPS)
    found = ranks.run(world, trained, plan, str(tmp_path / "run"))[0]
    same(found, expected)
    build().double().load_state_dict(found)
    export_weights(tmp_path / "run" / f"step-{STEPS:08d}", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    buffers = {name for name, _ in build().named_buffers()}
    assert buffers <= exported.keys()
    same({name: exported[name] for name in buffers}, {name: expected[name] for name in buffers})


@pytest.mark.parametrize("plan", ["pp2.mb8", pytest.param("dp1.mb8", marks=pytest.mark.soak)])
def test_statistics_of_channels_go_on_under_another_plan(ranks: Any, tmp_path: Path, plan: str) -> None:
    ranks.run(2, trained, "tp2.mb8", str(tmp_path / "run"), "", "", 2)
    start = str(tmp_path / "run" / "step-00000002")
    same(ranks.run(parse_plan(plan).world, trained, plan, "", start)[0], alone(STEPS))


def test_statistics_of_channels_start_from_a_file(ranks: Any, tmp_path: Path) -> None:
    expected = alone(1)
    (tmp_path / "weights").mkdir()
    whole = {name: value.clone() for name, value in expected.items()}
    save_file(whole, tmp_path / "weights" / "model.safetensors", {"format": "pt"})
    same(ranks.run(2, trained, "tp2.mb8", "", "", str(tmp_path / "weights"), 0)[0], expected)
