"""A decoder in the style of Mixtral: attention and norms of Llama, with a mixture of experts in place of each
feed-forward. A router picks `top_k` experts for each token and weights them by the softmax over the picked experts.

Sources: Jiang et al., Mixtral of Experts (2024), section 2.1; Shazeer et al., Outrageously Large Neural Networks
(2017). Parameter names follow Hugging Face's MixtralForCausalLM, with the experts stacked in one tensor per projection.
Shapes use B for batch, T for sequence, N for tokens (B * T), K for experts per token and C for hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class MoeConfig:
    """The sizes of the model. `base` has the sizes of the decoder; its `ffn` is the number of inner features of one
    expert.
    """

    base: LlamaConfig
    experts: int
    top_k: int


class MoeRouter(nn.Module):
    """Routes tokens (N, C). Returns the weights (N, K) and the indices (N, K) of the experts of each token."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.base.hidden))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, index = F.linear(hidden, self.weight).topk(self.top_k, dim=-1)
        return scores.softmax(-1), index


class MoeExperts(nn.Module):
    """Computes down(silu(gate(x)) * up(x)) with each token's experts and returns the weighted sum. Tokens are sorted by
    expert. Each projection is one grouped matrix product, for which the host needs no counts.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.base.ffn, config.base.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.base.hidden, config.base.ffn))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=self.num_experts).cumsum(0).int()
        gate, up = grouped_linear(hidden[order // index.shape[1]], self.gate_up_proj, ends).chunk(2, dim=-1)
        made = grouped_linear(F.silu(gate) * up, self.down_proj, ends)
        pairs = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (made[pairs].view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns the products of `rows` (P, C) with one of `weights` (E, D, C) each: (P, D). The rows of expert e end
    before row `ends[e]`. torch has no grouped product of float64, or of rows whose size is no multiple of 16 bytes."""
    aligned = not any(size * rows.itemsize % 16 for size in weights.shape[1:])
    if aligned and rows.dtype != torch.float64:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


class MoeFeedForward(nn.Module):
    """Router and experts in place of a dense feed-forward; input and output (B, T, C)."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.gate = MoeRouter(config)
        self.experts = MoeExperts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = self.gate(tokens)
        return self.experts(tokens, index, weights).view_as(x)


class MoeLlama(Llama):
    """The language model of Llama with a mixture of experts in place of the feed-forward in each block."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config.base)
        for layer in self.model.layers:
            layer.mlp = MoeFeedForward(config)
            for parameter in layer.mlp.parameters():
                nn.init.normal_(parameter, std=config.base.init_std)
