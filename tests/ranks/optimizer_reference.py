"""Optimizers beside one device: the plain model with torch's own optimizer, and the same rule under a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from equality import anatomy_of, loss_of, make_batch, make_model, measured
from torch import nn

from meshwright.analysis.block_lists import params_by_layer
from meshwright.models.registry import build_reference_model
from meshwright.runtime.optim.param_groups import FullParam
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.optimizer import CombinedOptimizer, optimizer_factory
from meshwright.train.trainer import Trainer, parallelize

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

RULES: dict[str, Make] = {
    "muon": optimizer_factory(OptimizerConfig(name="muon", lr=1e-2, matrix_lr=2e-2)),
    "muon as AdamW": optimizer_factory(OptimizerConfig(name="muon", lr=1e-3)),
    "adafactor": optimizer_factory(OptimizerConfig(name="adafactor", lr=1e-2, weight_decay=0.1)),
    "given NAdam": lambda given: torch.optim.NAdam(given, lr=1e-3),
    "given RMSprop": lambda given: torch.optim.RMSprop(given, lr=1e-3, momentum=0.9, centered=True),
}


def by_dimensions(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What scripts write: decay by the number of dimensions, which flat runs have not."""
    held = list(given)
    matrices, vectors = [each for each in held if each.ndim > 1], [each for each in held if each.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    )


def by_path(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups by the name that each parameter says, if it says one."""
    held = list(given)
    late = [each for each in held if ".3." in getattr(each, "path", "")]
    early = [each for each in held if ".3." not in getattr(each, "path", "")]
    return torch.optim.AdamW([{"params": late, "lr": 3e-2}, {"params": early}], lr=1e-3)


def by_name(model: nn.Module) -> Make:
    """What most scripts write: groups of the model's own parameters, whatever the optimizer is given."""

    def make(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = dict(model.named_parameters())
        late = [each for name, each in held.items() if ".3." in name and each.ndim > 1]
        plain = [each for name, each in held.items() if each.ndim < 2]
        rest = [each for name, each in held.items() if each.ndim > 1 and ".3." not in name]
        groups = [{"params": late, "lr": 3e-2}, {"params": plain, "weight_decay": 0.0}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.3)

    return make


def is_block(name: str) -> bool:
    return re.search(r"\.\d\.", name) is not None


def muon_by_name(model: nn.Module) -> Make:
    """Two optimizers of the model's own parameters, as one."""

    def make(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = dict(model.named_parameters())
        matrices = [each for name, each in held.items() if is_block(name) and each.ndim == 2]
        others = [each for name, each in held.items() if not (is_block(name) and each.ndim == 2)]
        return CombinedOptimizer([torch.optim.AdamW(others, lr=1e-3), torch.optim.Muon(matrices, lr=1e-2)], 1e-3)

    return make


RULES |= {"given AdamW by dimensions": by_dimensions, "given AdamW by path": by_path}

OWN: dict[str, Callable[[nn.Module], Make]] = {"own AdamW by name": by_name, "own Muon by name": muon_by_name}
"""Rules that are made of a model's own parameters."""


def make_trainer(rule: str, model: str, plan: str, precision: Any = "fp64") -> Trainer:
    whole = make_model(model)
    make = OWN[rule](whole) if rule in OWN else RULES[rule]
    return parallelize(whole, make, plan, precision=precision, clip=1.0, anatomy=anatomy_of(model))


def train(rule: str, model: str, plan: str, steps: int, save: str = "") -> dict[str, Any]:
    """On every rank."""
    return measured(make_trainer(rule, model, plan), model, steps, save)


def said_of_update(rule: str) -> list[Any]:
    """Of each group of the trainer's optimizer, whether it is fused."""
    return [group["fused"] for group in make_trainer(rule, "llama", "dp1").optimizer.param_groups]


def copies_after(plan: str, precision: str, steps: int) -> tuple[list[torch.Tensor], list[int], list[bool]]:
    """On every rank, of a tied GPT-2 whose vectors have odd sizes: this rank's copies of the tied weight, the lengths
    of all runs that the
    optimizer was given, whether its kernels are fused."""
    torch.manual_seed(0)
    model = build_reference_model(
        {"kind": "gpt2", "tied": True, "layers": 4, "hidden": 36, "heads": 4, "ffn": 52, "vocab": 97, "seq": 16}
    )
    trainer = parallelize(
        model, lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1), plan, precision=precision
    )
    for step in range(steps):
        ids = torch.randint(0, 97, (8, 16), generator=torch.Generator().manual_seed(step))
        trainer.step({"input_ids": ids, "labels": ids})
    groups = trainer.optimizer.param_groups
    runs = [each.numel() for group in groups for each in group["params"]]
    return (
        [unit.optim_shard.flat.clone() for unit, _ in trainer.engine.zero.tied],
        runs,
        [bool(group["fused"]) for group in groups],
    )


def go_on(rule: str, model: str, plan: str, steps: int, folder: str) -> dict[str, Any]:
    """On every rank: `steps` more from the checkpoint."""
    trainer = make_trainer(rule, model, plan)
    trainer.load(folder)
    first = trainer.steps
    losses = [trainer.step(make_batch(model, first + step)).loss for step in range(steps)]
    return {"losses": losses, "weights": trainer.full_state_dict()}


def alone(rule: str, name: str, steps: int) -> dict[str, Any]:
    """Plain PyTorch: whole parameters of the model, float64."""
    model = make_model(name).to(torch.float64)
    inside = {
        each: layer.startswith("block.") for layer, names in params_by_layer(model, anatomy_of(name)) for each in names
    }
    own = rule in OWN
    held = {
        each: value if own else FullParam(value.data, each, inside[each]) for each, value in model.named_parameters()
    }
    optimizer = OWN[rule](model)(()) if own else RULES[rule](held.values())
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps + 1):
        model.zero_grad()
        loss, tokens = loss_of(model, name, make_batch(name, max(step - 1, 0)))
        loss.backward()
        if step == 0:
            found |= {"first": loss.item(), "tokens": tokens}
            found["gradients"] = {each: value.grad.clone() for each, value in model.named_parameters()}
            continue
        found["losses"].append(loss.item())
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for each, value in model.named_parameters():
            held[each].grad = value.grad
        optimizer.step()
    found["weights"] = {each: value.detach() for each, value in model.named_parameters()}
    with torch.no_grad():
        found["evaluated"] = loss_of(model, name, make_batch(name, 99))[0].item()
    return found
