"""The watch of one step names what ran at the peak: a module, the model's own code, or the loss, which is no module."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.train.memory import watching

WORDS = 5000


class Wordy(nn.Module):
    """So many words that what the loss makes of them is the most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


class Squared(Wordy):
    """The most is made by the model's own code."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return (logits.square() + logits.exp()).mean(-1)


def test_the_loss_and_the_code_of_the_model_are_named_at_the_peak() -> None:
    tokens = torch.randint(WORDS, (256,))
    wordy, squared = Wordy(), Squared()
    with watching(wordy) as watch:
        F.cross_entropy(wordy(tokens), tokens).backward()
    assert watch.place in ("forward of the loss", "backward of the loss")
    with torch.enable_grad(), watching(wordy) as watch:
        held = F.cross_entropy(wordy(tokens), tokens)
    assert watch.place == "forward of the loss" and held.requires_grad
    with watching(squared) as watch:
        held = squared(tokens)
    assert watch.place == "forward of the model itself"


def test_what_an_earlier_watch_saw_made_may_go_while_another_looks() -> None:
    with watching():
        before = torch.ones(1000)
    with watching() as watch:
        del before
        torch.ones(10)
    assert watch.kept == -4000 and all(moment.buffers >= 0 and moment.activations >= 0 for moment in watch.moments)
