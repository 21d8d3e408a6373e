"""Several documents in one row: positions that begin anew tell where one begins, and attention stays inside of it.

Rule: a token whose position is not one more than that of the token before begins a document. Hugging Face's models read
`position_ids` so.

What a model returns: logits, and the mean loss over valid labels when labels were given.

Rule: a label of -100 counts nowhere. A causal model reads labels equal to its input ids and shifts them by one inside,
as Hugging Face does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """(B, 1, T, T): which keys each query sees, those of its own document up to itself.

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    documents = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


IGNORE_INDEX = -100


class ModelOutput(NamedTuple):
    """`logits` are (batch, sequence, vocabulary) or (batch, classes)."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def output_with_loss(logits: torch.Tensor, labels: torch.Tensor | None, shift: bool) -> ModelOutput:
    """`logits` with the mean loss that `labels` give."""
    if labels is None:
        return ModelOutput(logits)
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    flat = logits.reshape(-1, logits.shape[-1])
    return ModelOutput(logits, F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX))
