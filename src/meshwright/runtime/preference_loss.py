"""Computes the losses of preference training, DPO and ORPO, from rows with both answers of a pair. `meshwright train
--preference dpo` uses it, and own loops pass a `PreferenceLoss` to `parallelize`.

A row of the batch is a pair: two packed documents, the prompt with the chosen answer and the prompt with the rejected
answer (data/preferences.py). So no plan separates the answers of a pair, and the loss is a mean over rows, as of every
user's loss (loss.py). In addition to the inputs of the model, a batch has these entries:

    chosen_labels, rejected_labels          int64 (rows, sequence): the token ids of one answer, otherwise -100
    ref_chosen_logps, ref_rejected_logps    float64 (rows,): the reference's log-probabilities of the answers (DPO)

For a pair, let c and r be the log-probabilities of the chosen and of the rejected answer, each a sum over its tokens.
C and R are those of the reference model, c' and r' the means over the tokens.

    DPO     -log sigmoid(beta ((c - C) - (r - R)))
    ORPO    -c' - beta log sigmoid(log odds(c') - log odds(r')), with odds(x) = exp(x) / (1 - exp(x))

The loss of a step is the mean over all pairs of the batch. Sources: Rafailov et al., Direct Preference Optimization,
NeurIPS 2023, equation 7; Hong, Lee, Thorne, ORPO: Monolithic Preference Optimization without Reference Model, EMNLP
2024, equations 6 and 7.

Guarantees: the log-probabilities are sums in float32 or wider, whatever the precision of the model. A pair that has no
label of one answer adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.loss import IGNORE_INDEX, Batch, LossHead, ZeroWeightBatch, extract_logits, shift_labels

ANSWER_ENTRIES = ("chosen_labels", "rejected_labels")
REFERENCE_ENTRIES = ("ref_chosen_logps", "ref_rejected_logps")


def answer_log_probs(output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of the answers and their numbers of tokens, both (2, rows): chosen, rejected.

    `output`: the output of the model, with logits (rows, sequence, vocabulary) that predict the next token. Raises
    InputError if it has no such logits, or if the batch has no labels of the answers.
    """
    logits = extract_logits(output)
    missing = [name for name in ANSWER_ENTRIES if name not in batch]
    if logits is None or logits.ndim != 3 or missing:
        raise InputError(
            Message(
                "a preference loss needs {missing} in the batch, and logits (rows, sequence, vocabulary) of the model",
                missing=" and ".join(missing or ANSWER_ENTRIES),
            )
        )
    chosen, rejected = (shift_labels(batch[name]) for name in ANSWER_ENTRIES)
    wanted = torch.where(chosen.ne(IGNORE_INDEX), chosen, rejected)
    precise = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(precise), wanted.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).view(wanted.shape)
    masks = torch.stack([chosen, rejected]).ne(IGNORE_INDEX)
    return -torch.where(masks, losses, 0).sum(-1), masks.sum(-1)


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of preference pairs: `loss(output, batch)` returns the mean over the rows of the batch. `kind` is "dpo"
    or "orpo", `beta` as in the module docstring.

    Raises:
        InputError: `beta` is not positive, the batch has no labels of the answers, or DPO has no log-probabilities of
            the reference.
    """

    kind: Literal["dpo", "orpo"] = "dpo"
    beta: float = 0.1
    uncast_entries = REFERENCE_ENTRIES
    """The entries of a batch that keep their dtype when the batch is cast to the precision of the plan."""

    def __post_init__(self) -> None:
        if self.kind not in ("dpo", "orpo") or not self.beta > 0:
            raise InputError(
                Message(
                    "a preference loss is dpo or orpo with beta > 0, not {kind} with beta {beta}",
                    kind=self.kind,
                    beta=self.beta,
                )
            )

    def __call__(self, output: Any, batch: Batch) -> torch.Tensor:
        """Returns the mean loss over the rows of `batch`."""
        log_probs, counts = answer_log_probs(output, batch)
        is_pair = counts.gt(0).all(0)
        if self.kind == "dpo":
            if missing := [name for name in REFERENCE_ENTRIES if name not in batch]:
                raise InputError(
                    Message(
                        "dpo needs {missing} in the batch: add trainer.reference_log_probs(batch) before step 1",
                        missing=" and ".join(missing),
                    )
                )
            chosen, rejected = log_probs - torch.stack([batch[name] for name in REFERENCE_ENTRIES]).to(log_probs)
            losses = -F.logsigmoid(self.beta * (chosen - rejected))
        else:
            # A mean log-probability of 0 has infinite odds. Rows that lack an answer are not counted, so they get -1.
            means = torch.where(is_pair, log_probs / counts.clamp_min(1), -1.0)
            odds = means - torch.log1p(-means.exp())
            losses = -means[0] - self.beta * F.logsigmoid(odds[0] - odds[1])
        return torch.where(is_pair, losses, 0).mean()


ROW_ENTRY = "row"
"""The entry of a batch that numbers its rows while log-probabilities are recorded."""


@contextmanager
def recorded_log_probs(objective: LossHead, rows: int) -> Iterator[torch.Tensor]:
    """Yields a tensor (rows, 2), float64 on the CPU. While the context lasts, a forward of a batch with ROW_ENTRY
    writes the log-probabilities of its chosen and rejected answers there, on the ranks that compute the loss. Other
    rows are 0."""
    table = torch.zeros(rows, 2, dtype=torch.float64)

    def record(output: Any, batch: Batch) -> torch.Tensor:
        log_probs, _ = answer_log_probs(output, batch)
        if not isinstance(batch, ZeroWeightBatch):
            table[batch[ROW_ENTRY].cpu()] = log_probs.detach().t().cpu().double()
        return log_probs.sum(0).mean()

    own, objective.applied_loss = objective.applied_loss, record
    try:
        yield table
    finally:
        objective.applied_loss = own
