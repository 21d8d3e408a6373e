"""The sum of the cross-entropy over valid labels, also where each tensor rank holds a share of the vocabulary.

One log-softmax of the local logits is all that is kept; backward turns it into the gradient in place. With V the whole vocabulary, L the
log-sum-exp of the local logits and G that of all: softmax = softmax_local x exp(L - G), so that one maximum and one sum of a number a
label are all that ranks exchange, and backward exchanges nothing. Source: Shoeybi et al., Megatron-LM (2019), section 3, vocabulary-parallel
cross-entropy; the form with L is ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.parallel.mesh import Group

IGNORED = -100


def sum_loss(logits: torch.Tensor, labels: torch.Tensor, shift: bool, group: Group = None) -> torch.Tensor:
    """Scalar sum over valid labels (those that are not -100), in float32 at least.

    `logits` (..., V) or, with `group`, the local ceil(V / ranks) of them, the last ranks having fewer. With `shift` the logits at a place
    are held against the label of the next one.
    """
    wanted = shifted(labels, shift).reshape(-1).to(logits.device)
    return _SumLoss.apply(logits.reshape(-1, logits.shape[-1]), wanted, group)


def shifted(labels: torch.Tensor, shift: bool) -> torch.Tensor:
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED) if shift else labels


def count_labels(labels: torch.Tensor, shift: bool) -> int:
    """How many labels `sum_loss` sums over.

    >>> count_labels(torch.tensor([[5, -100, 3]]), True), count_labels(torch.tensor([[5, -100, 3]]), False)
    (1, 2)
    """
    return int((labels[..., 1:] if shift else labels).ne(IGNORED).sum())


class _SumLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group) -> torch.Tensor:
        """logits (N, V local), labels (N)."""
        precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_share = torch.log_softmax(logits, dim=-1, dtype=precise)
        valid = labels != IGNORED
        if group is None:
            local = torch.where(valid, labels, 0)
            mine = valid
            losses = -log_share.gather(1, local.unsqueeze(1)).squeeze(1)
            scale = None
        else:
            local, mine, losses, scale = _over_ranks(logits, log_share, labels, valid, group)
        ctx.save_for_backward(log_share, local, mine, valid, scale)
        ctx.dtype = logits.dtype
        return torch.where(valid, losses, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        log_share, local, mine, valid, scale = ctx.saved_tensors
        weight = torch.where(valid, gradient, 0).unsqueeze(1)
        with torch.no_grad():  # the saved tensor is ours alone; a second backward finds it changed and raises
            result = log_share.exp_().mul_(weight if scale is None else weight * scale.unsqueeze(1))
            result.scatter_add_(1, local.unsqueeze(1), torch.where(mine.unsqueeze(1), -weight, 0))
        return result.to(ctx.dtype), None, None


def _over_ranks(
    logits: torch.Tensor, log_share: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Local index of each label, whether it is here, its loss, and exp(L - G)."""
    count, width = log_share.shape
    peak, place = logits.max(dim=-1)
    share = peak.to(log_share.dtype) - log_share.gather(1, place.unsqueeze(1)).squeeze(1)
    highest = F.pad(share, (0, 1), value=width)  # rank 0 has the full width: so each rank learns where its vocabulary begins
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    local = labels - dist.get_rank(group) * int(highest[count])
    mine = valid & (local >= 0) & (local < width)
    local = torch.where(mine, local, 0)
    top = highest[:count]
    sums = torch.zeros(2, count, dtype=log_share.dtype, device=log_share.device)
    torch.exp(share - top, out=sums[0])
    sums[1] = torch.where(mine, log_share.gather(1, local.unsqueeze(1)).squeeze(1) + share, 0)
    dist.all_reduce(sums, group=group)
    whole = top + sums[0].log()
    return local, mine, whole - sums[1], torch.exp(share - whole)
