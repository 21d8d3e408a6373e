"""The sum of the cross-entropy over valid labels, also where each tensor rank holds a share of the vocabulary.

One softmax of the local logits is all that is kept; backward turns it into the gradient in place. With m the largest local logit and p its
probability, the log-sum-exp of the local logits is L = m - log p, which never underflows (p is at least 1 / V). Over ranks, with G the
log-sum-exp of all logits, softmax = local softmax x exp(L - G): one maximum and one sum of two numbers a label are all that ranks exchange,
and backward exchanges nothing. Source: Shoeybi et al., Megatron-LM (2019), section 3, vocabulary-parallel cross-entropy; the form with L is
ours. It takes every exponential once, torch's cross_entropy twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.parallel.exchange import exchange
from meshwright.parallel.exchange.group import Group

IGNORED = -100


def sum_loss(logits: torch.Tensor, labels: torch.Tensor, shift: bool, group: Group | None = None) -> torch.Tensor:
    """Scalar sum over valid labels (those that are not -100), in float32 at least.

    `logits` (..., V) or, with `group`, the local ceil(V / ranks) of them, the last ranks having fewer. With `shift` the logits at a place
    are held against the label of the next one.
    """
    wanted = (shifted(labels) if shift else labels).reshape(-1).to(logits.device)
    return _SumLoss.apply(logits.reshape(-1, logits.shape[-1]), wanted, group)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next place at every place; none at the last."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def count_labels(labels: torch.Tensor, shift: bool) -> int:
    """How many labels `sum_loss` sums over.

    >>> count_labels(torch.tensor([[5, -100, 3]]), True), count_labels(torch.tensor([[5, -100, 3]]), False)
    (1, 2)
    """
    return int((labels[..., 1:] if shift else labels).ne(IGNORED).sum())


class _SumLoss(torch.autograd.Function):
    """logits (N, local V), labels (N). Saved: the local softmax, and of each label its local index, whether it is here, and exp(L - G)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group | None) -> torch.Tensor:
        total, softmax, local, mine, scale = _parts(logits, labels, group)
        ctx.save_for_backward(softmax, local, mine, scale)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, local, mine, scale = ctx.saved_tensors
        return _of_logits(softmax, local, mine, scale, gradient).to(ctx.dtype), None, None


def local_losses(logits: torch.Tensor, labels: torch.Tensor, group: Group | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over valid labels, and its gradient with respect to `logits` (N, local V)."""
    total, softmax, local, mine, scale = _parts(logits, labels, group)
    return total, _of_logits(softmax, local, mine, scale, torch.ones_like(total)).to(logits.dtype)


def _parts(logits: torch.Tensor, labels: torch.Tensor, group: Group | None) -> tuple[Any, ...]:
    """The sum of the losses, the local softmax, of each label its local index, whether it is here, and exp(L - G) (None alone)."""
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    softmax = torch.softmax(logits, dim=-1, dtype=precise)
    peak = logits.amax(dim=-1).to(precise)
    above = -softmax.amax(dim=-1).log()  # L - m
    valid = labels != IGNORED
    if group is None:
        local = torch.where(valid, labels, 0)
        losses = above + (peak - _pick(logits, local, precise))
        scale, mine = None, valid
    else:
        local, mine, losses, scale = _over_ranks(logits, peak + above, labels, valid, group)
        scale = torch.where(valid, scale, 0)
    return torch.where(valid, losses, 0).sum(), softmax, local, mine, scale


def _of_logits(
    softmax: torch.Tensor, local: torch.Tensor, mine: torch.Tensor, scale: torch.Tensor | None, gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sum, in the memory of `softmax`: a second backward finds it changed and raises."""
    weight = torch.where(mine, gradient, 0) if scale is None else scale * gradient
    result = softmax.mul_(weight.unsqueeze(1))
    result.scatter_add_(1, local.unsqueeze(1), torch.where(mine, -gradient, 0).unsqueeze(1))
    return result


def _pick(logits: torch.Tensor, places: torch.Tensor, precise: torch.dtype) -> torch.Tensor:
    return logits.gather(1, places.unsqueeze(1)).squeeze(1).to(precise)


def _over_ranks(
    logits: torch.Tensor, share: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Local index of each label, whether it is here, its loss, and exp(L - G)."""
    count, width = logits.shape
    highest = F.pad(share, (0, 1), value=width)  # rank 0 has the full width: so each rank learns where its vocabulary begins
    exchange.all_reduce(highest, group, largest=True).wait()
    local = labels - group.index * highest[count].to(labels.dtype)  # read where it lies: no device is waited for
    mine = valid & (local >= 0) & (local < width)
    local = torch.where(mine, local, 0)
    top = highest[:count]
    own = (share - top).exp()
    sums = torch.stack([own, torch.where(mine, _pick(logits, local, share.dtype) - top, 0)])
    exchange.all_reduce(sums, group).wait()
    return local, mine, sums[0].log() - sums[1], own / sums[0]
