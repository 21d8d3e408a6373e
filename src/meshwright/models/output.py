"""What a model returns: logits, and the mean loss over valid labels when labels were given.

Rule: a label of -100 counts nowhere. A causal model reads labels equal to its input ids and shifts them by one inside, as Hugging Face does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

IGNORED = -100


class Output(NamedTuple):
    """`logits` are (batch, sequence, vocabulary) or (batch, classes)."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def output(logits: torch.Tensor, labels: torch.Tensor | None, shift: bool) -> Output:
    """`logits` with the mean loss that `labels` give."""
    if labels is None:
        return Output(logits)
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    flat = logits.reshape(-1, logits.shape[-1])
    return Output(logits, F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED))
