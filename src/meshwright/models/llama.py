"""A decoder in the style of Llama. It has rotary positions, RMSNorm before attention and feed-forward, a SiLU-gated
feed-forward, grouped key-value heads, and no biases unless `qkv_bias` is set. With `qk_norm`, an RMSNorm over the
features of each head normalizes queries and keys before the rotation. With `parallel`, attention and feed-forward read
the same norm, and their outputs are added together.

Sources: Touvron et al., LLaMA (2023), section 2.2; Su et al., RoFormer (2021), section 3.4 (rotation of halves, as
Hugging Face stores it); Ainslie et al., GQA (2023); Qwen Team, Qwen3 (2025), section 2 (QK-norm); Chowdhery et al.,
PaLM (2022), section 2 (parallel layers). Parameter names follow Hugging Face's LlamaForCausalLM. Shapes use B for
batch, T for sequence and C for hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.documents import AttentionMask, attention_mask, causal_attention, is_varlen_head
from meshwright.models.model_io import ModelOutput, output_with_loss


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of the model. `head_dim` 0 means hidden / heads. `qkv_bias`: whether query, key and value have biases,
    as in Qwen2. `qk_norm`: whether queries and keys are normalized, as in Qwen3. `parallel`: whether a block has one
    norm, which attention and feed-forward read, as in PaLM.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    tied: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    rope_base: float = 10_000.0
    qk_norm: bool = False
    parallel: bool = False
    eps: float = 1e-5
    init_std: float = 0.02

    @property
    def head_size(self) -> int:
        """Returns the width of one attention head."""
        return self.head_dim or self.hidden // self.heads


class RMSNorm(nn.Module):
    """Computes x / rms(x) in float32 or float64, converts it to the dtype of x, and multiplies it by the weight.
    Source: Zhang and Sennrich (2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Returns the cosines and sines (1 or B, 1, T, head_dim) of the rotation at each position. It has no parameters and
    no buffers, so it adds nothing to checkpoints."""

    def __init__(self, head_size: int, base: float) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.head_size, 2, device=x.device, dtype=precise) / self.head_size
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0) if position_ids is None else position_ids
        angles = places.to(precise).unsqueeze(-1) * self.base**-steps
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `x` (B, heads, T, head_dim), rotated by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions; input and output (B, T, C)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.q_proj = nn.Linear(config.hidden, config.heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.eps) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], mask: AttentionMask = None
    ) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rotary(each.transpose(1, 2), *positions) for each in (q, k))
        v = self.v_proj(x).view(shape).transpose(1, 2)
        y = causal_attention(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LlamaFeedForward(nn.Module):
    """Computes down(silu(gate(x)) * up(x)). Source: Shazeer, GLU Variants (2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """One decoder block: RMSNorm before attention and before the feed-forward, or one for both, with residual sums."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = None if config.parallel else RMSNorm(config.hidden, config.eps)
        self.mlp = LlamaFeedForward(config)

    def forward(
        self, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], mask: AttentionMask = None
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        if self.post_attention_layernorm is None:
            return x + self.self_attn(normed, positions, mask) + self.mlp(normed)
        x = x + self.self_attn(normed, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaDecoder(nn.Module):
    """Embeddings, blocks and final norm. Maps token ids (B, T) to hidden states (B, T, C). `needs_dense_mask`: whether
    attention over packed documents needs a dense mask (documents.py)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.rotary = RotaryEmbedding(config.head_size, config.rope_base)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.needs_dense_mask = not is_varlen_head(config.head_size)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        positions = self.rotary(x, position_ids)
        mask = attention_mask(position_ids, x, self.needs_dense_mask)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x)


class Llama(nn.Module):
    """The language model: decoder and vocabulary head."""

    shift_labels = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaDecoder(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> ModelOutput:
        """Returns logits and, with labels, the mean loss. Where `position_ids` restart, a new document begins, and
        attention does not cross into it.
        """
        return output_with_loss(self.lm_head(self.model(input_ids, position_ids)), labels, self.shift_labels)
