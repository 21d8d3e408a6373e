"""A model of four residual blocks, its batches and its optimizer, which several tests of odd cases change."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, RATE = 32, 16, 1e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)
