"""The loss in chunks: the product with the vocabulary and its cross-entropy over a part of the labels at a time, so that all logits never exist.

[Note: gradients at once] The loss is a scalar, so its gradient with respect to the head's input and weight is known up to one factor as soon as the
logits of a chunk are: forward makes and keeps these (H numbers a label, and the weight's gradient once), and backward multiplies them by the
factor. No product is done twice. Tokens x vocabulary numbers, kept and passing, shrink to a chunk of them. Exact: every label's loss is computed as
without chunks (loss.py), over tensor ranks as well; only the sum over the chunks of a weight's gradient has another order.

The head's place in the model gives a tensor without memory. A model that computes on (a cap, a scale) hands on another tensor: that is found, and
refused. Source of the idea: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al., Liger Kernel (2024), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.anatomy import Anatomy, is_plain
from meshwright.base.errors import InputError
from meshwright.parallel.exchange.group import Group
from meshwright.parallel.tensor.loss import local_losses
from meshwright.spec.plan import Plan


class ChunkedHead:
    """The forward of a vocabulary head that makes the loss instead of logits. `labels` of the pass, as the loss counts them, are given before."""

    def __init__(self, module: nn.Module, chunks: int, group: Group | None) -> None:
        self.module, self.chunks, self.group = module, chunks, group
        self.linear = isinstance(module, nn.Linear)
        self.labels: torch.Tensor | None = None
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        assert self.labels is not None and weight is not None
        if self.labels.numel() != x.shape[:-1].numel():
            raise InputError(
                f"lc{self.chunks}: the head is given {x.shape[:-1].numel()} places for {self.labels.numel()} labels: leave lc out"
            )
        rows = x.reshape(-1, x.shape[-1])
        loss: torch.Tensor = _Chunked.apply(rows, weight, bias, self.labels.reshape(-1).to(x.device), self.chunks, self.linear, self.group)
        width = weight.shape[0] if self.linear else weight.shape[1]
        logits = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device="meta")
        self.made = (logits, loss)
        return logits

    def take(self, logits: torch.Tensor | None) -> torch.Tensor:
        """The loss of the pass, whose model gave `logits`."""
        made, self.made, self.labels = self.made, None, None
        if made is None or made[0] is not logits:
            raise InputError(
                f"lc{self.chunks}: the model goes on computing with what its head gives (a cap or a scale of logits): leave lc out"
            )
        return made[1]


def chunk_loss(model: nn.Module, anatomy: Anatomy, plan: Plan, group: Group | None, own_loss: bool) -> ChunkedHead | None:
    """The head of `model` as the plan wants it; None where logits are made at once, or by another rank."""
    if plan.loss_chunks == 1:
        return None
    if own_loss or anatomy.head is None:
        why = "a loss of one's own needs the logits" if own_loss else "this model has no vocabulary head"
        raise InputError(f"plan {plan.name}: lc{plan.loss_chunks}: {why}: leave lc out")
    head = model.get_submodule(anatomy.head)
    if not is_plain(head) and "forward" not in vars(head):
        return None  # stands in for another stage's
    entry = next((hook for hook in head._forward_pre_hooks.values() if hasattr(hook, "was_read")), None)
    if entry is not None:
        head.register_forward_hook(entry.was_read)
    return ChunkedHead(head, plan.loss_chunks, group)


class _Chunked(torch.autograd.Function):
    """x (N, H), weight (V, H) when `linear` else (H, V), labels (N): the sum of the losses of valid labels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunks: int,
        linear: bool,
        group: Any,
    ) -> torch.Tensor:
        wanted, precise = ctx.needs_input_grad, torch.promote_types(x.dtype, torch.float32)
        of_x = torch.empty_like(x) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=precise) if wanted[2] and bias is not None else None
        total = torch.zeros((), dtype=precise, device=x.device)
        start = 0
        for part in x.chunk(chunks):
            own = slice(start, start + len(part))
            start += len(part)
            loss, gradient = local_losses(F.linear(part, weight if linear else weight.t(), bias), labels[own], group)
            total += loss
            if of_x is not None:
                torch.mm(gradient, weight if linear else weight.t(), out=of_x[own])
            if of_weight is not None:
                of_weight += gradient.t() @ part if linear else part.t() @ gradient
            if of_bias is not None:
                of_bias += gradient.sum(0)
        ctx.save_for_backward(of_x, of_weight, of_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[Any, ...]:
        of_x, of_weight, of_bias = (None if kept is None else kept.mul_(factor) for kept in ctx.saved_tensors)
        to = ctx.dtype
        return of_x, None if of_weight is None else of_weight.to(to), None if of_bias is None else of_bias.to(to), None, None, None, None
