"""A decoder in the style of GPT-2. It has learned positions, LayerNorm before attention and feed-forward, and biases.
Its activation is GELU, or ReLU as in OPT (Zhang et al., arXiv 2205.01068, section 2.1). Query, key and value have one
fused projection. By default, the vocabulary head is tied to the embedding.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3. The initial weights of
residual projections are divided by sqrt(2 x layers). Parameter names follow Hugging Face's GPT2LMHeadModel, but weights
are stored as in `nn.Linear`, (out, in). Shapes use B for batch, T for sequence and C for hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.documents import AttentionMask, attention_mask, causal_attention, is_varlen_head
from meshwright.models.model_io import ModelOutput, output_with_loss


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of the model. `dropout` is the dropout rate. `relu`: whether ReLU replaces GELU."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    tied: bool = True
    dropout: float = 0.0
    eps: float = 1e-5
    init_std: float = 0.02
    relu: bool = False


class GPT2Attention(nn.Module):
    """Causal self-attention with one fused query-key-value projection; input and output (B, T, C)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.head_dim = config.hidden // config.heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor, mask: AttentionMask = None) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = causal_attention(q, k, v, mask, dropout)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GPT2FeedForward(nn.Module):
    """Two linear layers with GELU or ReLU between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, config.ffn)
        self.c_proj = nn.Linear(config.ffn, config.hidden)
        self.relu = config.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.c_fc(x)
        return self.c_proj(F.relu(inner) if self.relu else F.gelu(inner, approximate="tanh"))


class GPT2Block(nn.Module):
    """One decoder block: LayerNorm before attention and before the feed-forward, with residual sums."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.mlp = GPT2FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: AttentionMask = None) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), mask))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT2Transformer(nn.Module):
    """Embeddings, blocks and final norm. Maps token ids (B, T) to hidden states (B, T, C). `needs_dense_mask`: whether
    attention over packed documents needs a dense mask (documents.py)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.seq, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden, eps=config.eps)
        self.needs_dense_mask = config.dropout > 0 or not is_varlen_head(config.hidden // config.heads)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
        x = self.dropout(self.wte(input_ids) + self.wpe(places))
        mask = attention_mask(position_ids, x, self.needs_dense_mask)
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)


class GPT2(nn.Module):
    """The language model: decoder and vocabulary head."""

    shift_labels = True

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = GPT2Transformer(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                shrink = (2 * config.layers) ** -0.5 if name.endswith("c_proj") else 1.0
                nn.init.normal_(module.weight, std=config.init_std * shrink)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> ModelOutput:
        """Returns logits and, with labels, the mean loss. Where `position_ids` restart, a new document begins, and
        attention does not cross into it.
        """
        return output_with_loss(self.lm_head(self.transformer(input_ids, position_ids)), labels, self.shift_labels)
