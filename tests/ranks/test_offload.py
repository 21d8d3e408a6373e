"""What waits on the host or in files is what would have stayed: losses and weights bit for bit, whatever the plan, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer

from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import Trainer, parallelize


def trained(name: str, plan: str, precision: str, folder: str, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor] | None, dict[str, int]]:
    trainer = made(name, plan, precision, folder)
    losses = [trainer.step(make_batch(name, step)).loss for step in range(steps)]
    return losses, trainer.full_state_dict(), trainer.bytes()


def made(name: str, plan: str, precision: str, folder: str) -> Trainer:
    small = parse_plan(plan).but(bucket=40_000)
    return parallelize(make_model(name), make_optimizer, small, precision=precision, clip=1.0, anatomy=anatomy_of(name), offload_to=folder)


CASES = [
    ("llama", "dp1", "fp32"), ("llama", "dp2", "fp64"), ("llama", "dp2.z1", "bf16"), ("llama", "dp2.z2", "fp32"), ("llama", "dp2.z3", "bf16"),
    ("llama", "tp2", "fp16"), ("llama-tied", "pp2", "bf16"), ("llama", "dp2.pp2.z3", "fp32"), ("gpt2", "dp2.z1", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize("way", ["off-optimizer", "off-optimizer-files"])
@pytest.mark.parametrize(("name", "plan", "precision"), CASES)
def test_a_run_with_its_optimizer_away_is_bit_for_bit_the_run_without(ranks: Any, tmp_path: Any, way: str, name: str, plan: str, precision: str) -> None:
    world = parse_plan(plan).world
    here = ranks.run(world, trained, name, plan, precision, str(tmp_path))
    away = ranks.run(world, trained, name, f"{plan}.{way}", precision, str(tmp_path))
    for (losses, weights, held), (others, theirs, elsewhere) in zip(here, away, strict=True):
        assert losses == others
        assert weights is None or all(torch.equal(weights[key], theirs[key]) for key in weights)
        assert elsewhere["offloaded"] == held["optimizer"] and elsewhere["optimizer"] == 0
    assert not list(tmp_path.iterdir())
