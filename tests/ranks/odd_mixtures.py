"""Mixtures whose experts do something beyond their products: over tokens, in training alone, in backward alone, or
behind a weight of zero; float64.

`mixed_outcomes(plan, ways)` runs on every rank: for each way the loss, the gradients and the losses of three steps and
of an evaluation, or why the plan is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from equality import difference, loss_of, make_batch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.models.moe import MoeExperts
from meshwright.models.registry import build_reference_model
from meshwright.train.trainer import parallelize

SIZES = {"kind": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 12, "vocab": 96, "seq": 32,
    "experts": 4, "top_k": 2, "moe_ffn": 12}  # fmt: skip


class OddExperts(MoeExperts):
    """Each pair by itself: act(x up) down, weighted and summed; and what `way` adds to it."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        way, training = self.way, self.training
        match way:
            case "noise" if training:
                hidden = hidden * (1 + 0.1 * torch.rand_like(hidden))
            case "capacity" if training:
                before = F.one_hot(index.flatten(), self.num_experts).cumsum(0).gather(1, index.view(-1, 1))
                weights = weights * (before.view(index.shape) <= 3)
            case "square" if training:
                weights = weights**2
            case "eval square" if not training:
                weights = weights**2
            case "backward tokens":
                hidden = Backward.apply(hidden, 1 + 1 / len(hidden))
            case "many tokens" if len(hidden) > 20:
                hidden = hidden * (1 + 1 / len(hidden))
            case "written":
                self.seen.copy_(0.9 * self.seen + hidden.detach().mean(0))
                hidden = hidden - self.seen
            case "scaled":
                hidden = hidden * self.scale[index[:, 0]].unsqueeze(1)
            case "dropped":
                hidden = F.dropout(hidden, self.dropout, training)
        inner = torch.einsum("nc,nkfc->nkf", hidden, self.gate_up_proj[index])
        match way:
            case "training width" if training:
                inner = inner - inner.mean(-1, keepdim=True)
            case "eval width" if not training:
                inner = inner - inner.mean(-1, keepdim=True)
            case "backward width":
                inner = Backward.apply(inner, 1 + 1 / inner.shape[-1])
            case "many tokens, width" if len(hidden) > 20:
                inner = inner - inner.mean(-1, keepdim=True)
        pairs = torch.einsum("nkf,nkcf->nkc", F.silu(inner), self.down_proj[index])
        match way:
            case "pairs normed":
                pairs = pairs / (1 + pairs.norm())
            case "zero gate":
                pairs = pairs + self.gate[index] * pairs.mean((0, 1))
            case "zero down":
                pairs = pairs * (1 + pairs.detach().mean())
        return (pairs * weights.unsqueeze(2)).sum(1)


class Backward(torch.autograd.Function):
    """The same forward; backward it is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def make_mixture(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_reference_model(SIZES).double()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.__class__, experts.way = OddExperts, way
        experts.gate_up_proj = nn.Parameter(torch.randn(4, 12, 16, dtype=torch.float64) / 4)
        experts.down_proj = nn.Parameter(torch.randn(4, 16, 12, dtype=torch.float64) / 4)
        if "zero down" in way:
            nn.init.zeros_(experts.down_proj)
        if way == "zero gate":
            experts.gate = nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
        if way == "written":
            experts.register_buffer("seen", torch.zeros(16, dtype=torch.float64))
        if way == "dropped":
            experts.dropout = 0.5
        if way == "scaled":
            experts.register_buffer("scale", torch.ones(4, dtype=torch.float64))
    return model


def random_states(plan: str) -> list[int]:
    """On every rank: the sum of torch's random state behind each of two steps of a model that drops what its experts
    are given."""
    trainer, found = parallelize(make_mixture("dropped"), sgd, plan, precision="fp64", prove="never"), []
    for step in range(2):
        trainer.step(make_batch("mixture", step))
        found.append(int(torch.get_rng_state().long().sum()))
    trainer.close()
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def mixed_outcomes(plan: str, ways: Sequence[str]) -> list[Any]:
    return [_outcome(plan, way) for way in ways]


def _outcome(plan: str, way: str) -> Any:
    batch = make_batch("mixture", 0)
    try:
        trainer = parallelize(make_mixture(way), sgd, plan, precision="fp64", prove="never")
        loss, _, gradients = trainer.gradients(batch)
        losses = [trainer.step(batch).loss for _ in range(3)] + [trainer.evaluate(batch)]
        trainer.close()
    except InputError as error:
        return str(error)
    return loss, gradients, losses


def is_alone(found: Any, way: str) -> bool:
    """Whether a rank found what one device computes with torch's own loss, to 1e-10 (rank 0 has the gradients)."""
    model, batch = make_mixture(way), make_batch("mixture", 0)
    optimizer, losses, gradients = sgd(model.parameters()), [], {}
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, "mixture", batch)[0]
        loss.backward()
        gradients = gradients or {
            name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }
        losses.append(loss.item())
        optimizer.step()
    with torch.no_grad():
        losses.append(loss_of(model.eval(), "mixture", batch)[0].item())
    same = (
        [difference(found[1][name], one) <= 1e-10 for name, one in gradients.items() if one.norm() > 1e-12]
        if found[1]
        else [True]
    )
    return all(same) and all(
        abs(a / b - 1) <= 1e-10 for a, b in zip((found[0], *found[2]), (losses[0], *losses), strict=True)
    )
