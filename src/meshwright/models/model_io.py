"""The outputs of the reference models: logits and the loss.

A model returns logits, and with labels the mean loss over valid labels. A label of -100 is invalid. For a causal model
the labels equal the input ids, and the model shifts them by one, as Hugging Face models do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

IGNORE_INDEX = -100


class ModelOutput(NamedTuple):
    """The output of a model. `logits` are (batch, sequence, vocabulary) or (batch, classes). `loss` is None without
    labels.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def output_with_loss(logits: torch.Tensor, labels: torch.Tensor | None, shift: bool) -> ModelOutput:
    """Returns `logits`, with the mean loss over the valid `labels`. `shift`: whether the logits at position t are
    compared with label t + 1 (instead of label t).
    """
    if labels is None:
        return ModelOutput(logits)
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    flat = logits.reshape(-1, logits.shape[-1])
    return ModelOutput(logits, F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX))
