"""An encoder in the style of BERT with the masked-language head. It has learned positions, bidirectional attention,
GELU, and LayerNorm after each residual sum.

The head consists of a dense layer, GELU, LayerNorm, and a decoder. By default, the weight of the decoder is tied to the
embedding. Its bias is separate.

Source: Devlin et al., BERT (2019), section 3 and appendix A.2. Labels are not shifted. They are -100 except at masked
positions. Parameter names follow Hugging Face's BertForMaskedLM. Shapes use B for batch, T for sequence and C for
hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.model_io import ModelOutput, output_with_loss


@dataclass(frozen=True)
class BertConfig:
    """The sizes of the model. `types` is the number of segment types."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    tied: bool = True
    types: int = 2
    eps: float = 1e-12
    init_std: float = 0.02


class BertEmbeddings(nn.Module):
    """The sum of token, position and segment embeddings, followed by LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.hidden)
        self.position_embeddings = nn.Embedding(config.seq, config.hidden)
        self.token_type_embeddings = nn.Embedding(config.types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = self.position_embeddings(torch.arange(input_ids.shape[1], device=input_ids.device))
        types = self.token_type_embeddings(torch.zeros_like(input_ids))
        return self.norm(self.word_embeddings(input_ids) + positions + types)


class BertAttention(nn.Module):
    """Bidirectional self-attention with a fused kernel; input and output (B, T, C)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.heads
        self.attention_head_size = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.num_attention_heads, self.attention_head_size)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.output(y.transpose(1, 2).flatten(2))


class BertLayer(nn.Module):
    """One encoder layer: attention and feed-forward, each followed by a residual sum and LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.intermediate = nn.Linear(config.hidden, config.ffn)
        self.output = nn.Linear(config.ffn, config.hidden)
        self.output_norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class BertEncoder(nn.Module):
    """Embeddings and encoder layers. Maps token ids (B, T) to hidden states (B, T, C)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.layers))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layer:
            x = layer(x)
        return x


class BertHeadTransform(nn.Module):
    """The dense layer, GELU and LayerNorm between the last encoder layer and the decoder."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Bert(nn.Module):
    """The masked-language model: encoder, transform and vocabulary decoder."""

    shift_labels = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertEncoder(config)
        self.transform = BertHeadTransform(config)
        self.decoder = nn.Linear(config.hidden, config.vocab)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.init_std)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)
        if config.tied:
            self.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        return output_with_loss(self.decoder(self.transform(self.bert(input_ids))), labels, self.shift_labels)
