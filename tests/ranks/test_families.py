"""Families of models, unmodified, under every kind of plan: the loss is the loss of one device in float64, to 1e-10.

`make test` runs one or two plans a family, in turn; the soak runs them all and writes bench/results/families.md.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import check
from families import batch_of, build_family, objective_of
from torch.nn import functional as F

from meshwright.anatomy import Anatomy, read
from meshwright.base.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

pytest.importorskip("transformers")
torch.set_num_threads(1)
TABLE = Path(__file__).parents[2] / "bench" / "results" / "families.md"

PLANS = (
    "dp2.mb4", "tp2.mb8", "tp4.mb8", "tp8.mb8", "tp2.sp.mb8", "pp2.mb4", "tp2.pp2.mb4", "dp2.z3.mb4", "dp2.tp2.z2.mb4", "pp2.dp2.z3.mb2",
    "tp2.mb4.rc-layer", "dp2.tp2.sp.z1.mb4", "dp2.tp2.pp2.z1.mb2", "tp4.sp.mb8",
)  # fmt: skip


@functools.cache
def anatomy_of(name: str) -> Anatomy:
    return read(build_family(name))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def under_plan(name: str, plan: str) -> dict[str, Any] | str:
    """On every rank: what `equality.train` gives for a family, or why the plan is refused."""
    try:
        trainer = parallelize(build_family(name), optimizer_of, plan, precision="fp64", clip=1.0, anatomy=anatomy_of(name))
        loss, tokens, gradients = trainer.gradients(batch_of(name, 0))
    except InputError as error:
        return str(error)
    records = [trainer.step(batch_of(name, step)) for step in range(2)]
    result = {"first": loss, "tokens": tokens, "gradients": gradients, "losses": [record.loss for record in records]}
    result |= {"norms": [record.gradient_norm for record in records], "weights": trainer.full_state_dict()}
    result["evaluated"] = trainer.evaluate(batch_of(name, 9))
    trainer.close()
    return result


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """What one device computes, with torch's own loss and optimizer."""
    model = build_family(name).double()
    optimizer = optimizer_of(model.parameters())
    shift = objective_of(name) == "causal"

    def loss_of(step: int) -> torch.Tensor:
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch_of(name, step).items()}
        labels = batch.pop("labels")
        logits = model(**batch).logits
        labels = F.pad(labels[:, 1:], (0, 1), value=-100) if shift else labels
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)

    labels = batch_of(name, 0)["labels"]
    loss = loss_of(0)
    loss.backward()
    result: dict[str, Any] = {"first": loss.item(), "tokens": int(((labels[:, 1:] if shift else labels) != -100).sum())}
    result["gradients"] = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    for key, value in model.named_parameters():
        result["gradients"].setdefault(key, torch.zeros_like(value))
    result |= {"losses": [], "norms": []}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        result["losses"].append(loss.item())
        for value in model.parameters():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    result["weights"] = {key: value.detach() for key, value in model.named_parameters()}
    with torch.no_grad():
        result["evaluated"] = loss_of(9).item()
    return result


REFUSED = {
    ("opt", "sp"): "reads batch and sequence as one",
    ("codegen", "sp"): "stays whole",
    ("olmo2", "sp"): "stays whole",
    ("deberta", "sp"): "stays whole",
    ("stablelm-norm", "sp"): "stays whole",
    ("mamba", "tp"): "no part of this model can be sharded",
    ("vit", "sp"): "sequence (17) is not a multiple of tp(",
    ("t5", "sp"): "blocks stand in several lists",
    ("falcon", "tp8"): "must divide",
    ("codegen", "tp8"): "",
}
"""Family and part of the plan: what the refusal says."""


def run_pair(ranks: Any, name: str, plan: str) -> tuple[float, float] | str:
    results = ranks.run(parse_plan(plan).world, under_plan, name, plan)
    if isinstance(results[0], str):
        assert len(set(results)) == 1, "ranks refuse for different reasons"
        assert "\n" not in results[0]
        return results[0]
    return check(alone(name), results, "fp64")
