"""Bodies of the blocks of odd models by name, each with what is not promised for it, in words of
odd_grammar.AGAINST."""

from __future__ import annotations

from collections.abc import Callable

import torch
from odd_grammar import WIDTH, UnitGradient, hooked
from torch import nn
from torch.nn import functional as F

HEADS, INNER = 4, 16


INNERS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], torch.Tensor], str]] = {
    "train-mean": (lambda owner, h: h - h.mean(-1, keepdim=True) if owner.training else h, "tensor"),
    "train-scale": (lambda owner, h: h * 1.2 if owner.training else h, ""),
    "long-mean": (lambda owner, h: h - h.mean(-1, keepdim=True) if h.shape[1] > 9 else h, "tensor sequence"),
    "value-mean": (lambda owner, h: h - h.mean(-1, keepdim=True) if h.detach().mean() > 0 else h, "any"),
    "softmax": (lambda owner, h: h.softmax(-1), "tensor"),
    "half": (lambda owner, h: torch.cat([h[..., :8], 2 * h[..., 8:]], -1), "tensor"),
    "dropout-all": (lambda owner, h: h + F.dropout(h, 1.0, owner.training), ""),
    "hook-bent": (lambda owner, h: hooked(h, lambda gradient: torch.tanh(gradient * 50) / 50), "any"),
    "hook-norm": (lambda owner, h: hooked(h, lambda gradient: gradient / (1e-3 + gradient.norm())), "any"),
    "features": (lambda owner, h: h * (1 + 0.1 * torch.arange(h.shape[-1], dtype=h.dtype)), "tensor"),
    "unit-gradient": (lambda owner, h: UnitGradient.apply(h), "any"),
    "half-detach": (lambda owner, h: 0.5 * h + 0.5 * h.detach(), ""),
    "sequence-mean": (lambda owner, h: h + h.mean(1, keepdim=True), "sequence"),
}
"""What may happen to the features between the layers of a perceptron, which tensor ranks share."""


class Perceptron(nn.Module):
    def __init__(self, inner: str = "") -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        return self.down(INNERS[self.inner][0](self, h) if self.inner else h)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention with one projection for queries, keys and values and scores of its own, over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.inner(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Mixture(nn.Module):
    """All experts on all tokens, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Perceptron() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack([expert(x) for expert in self.experts], -1) * self.router(x).softmax(-1).unsqueeze(-2)).sum(
            -1
        )


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.perceptron = Attention(), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x) + self.perceptron(x)


BODIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (Perceptron, ""),
    "gated": (Gated, ""),
    "attention": (Attention, ""),
    "parallel": (Parallel, ""),
    "fused": (Fused, "sequence tensor"),
    "conv": (Convolution, "sequence tensor"),
    "recurrent": (Recurrent, "sequence tensor"),
    "mixture": (Mixture, "tensor sequence"),
}
