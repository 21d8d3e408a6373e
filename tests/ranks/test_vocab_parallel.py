"""What a model makes of its table of words and of its logits: what is done word by word leaves the vocabulary shared by
tensor ranks, anything else
keeps it whole, and both are the loss of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS = 39

ENDS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], torch.Tensor], bool]] = {
    "as they are": (lambda model, logits: logits, True),
    "capped": (lambda model, logits: 5 * torch.tanh(logits / 5), True),
    "with a buffer": (lambda model, logits: logits + model.shift, False),
    "by a parameter": (lambda model, logits: logits * model.weights, True),
    "the last places": (lambda model, logits: logits[:, -4:], True),
    "log of softmax": (lambda model, logits: F.log_softmax(logits, -1), False),
    "around their mean": (lambda model, logits: logits - logits.mean(-1, keepdim=True), False),
    "of length one": (lambda model, logits: F.normalize(logits, dim=-1), False),
    "some words": (lambda model, logits: logits[..., :33], False),
    "a mask made on the spot": (lambda model, logits: logits.masked_fill(torch.arange(WORDS) % 7 == 6, -9.0), False),
    "by a learned number": (lambda model, logits: logits * model.scale, False),
    "in rows of so many words": (lambda model, logits: logits.view(-1, WORDS).view(*logits.shape), False),
    "of the table": (lambda model, logits: F.linear(logits @ model.head.weight, model.table.weight), False),
}
"""What is done with logits, and whether tensor ranks may hold a share of them."""


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3.0


class Normed(nn.Embedding):
    """Inkling's form: a norm inside the layer, whose weight each token moves."""

    def __init__(self, words: int, features: int) -> None:
        super().__init__(words, features)
        self.norm = nn.RMSNorm(features, eps=1e-6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


class Limited(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.clamp(max=25))


TABLES: dict[type[nn.Embedding], bool] = {nn.Embedding: True, Scaled: True, Normed: False, Limited: False}
"""Layers that read the table, and whether tensor ranks may hold a share of its rows."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    shift_labels = False

    def __init__(self, end: str, table: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.end = end
        self.table, self.layers, self.head = (
            table(WORDS, 16),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(16, WORDS),
        )
        self.weights, self.scale = nn.Parameter(torch.randn(1, WORDS)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.randn(WORDS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return ENDS[self.end][0](self, self.head(x))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean over rows of equally many labels."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"][:, -output.shape[1] :].flatten())


def train(end: str, own: bool, table: type[nn.Embedding] = nn.Embedding) -> tuple[list[float], dict[str, torch.Tensor]]:
    made = batch() if own or end != "the last places" else {key: value[:, -4:] for key, value in batch().items()}
    trainer = parallelize(
        Net(end, table),
        lambda given: torch.optim.SGD(given, lr=0.1),
        "tp2.mb4",
        precision="fp64",
        loss=loss_of if own else None,
    )
    losses = [trainer.step(made).loss for _ in range(2)]
    whole = trainer.full_state_dict()
    trainer.close()
    return losses, whole


def train_all(own: bool, ends: list[str]) -> dict[str, Any]:
    return {end: train(end, own) for end in ends}


def alone(end: str, own: bool, table: type[nn.Embedding] = nn.Embedding) -> tuple[list[float], nn.Module]:
    model = Net(end, table).double()
    made = batch() if own or end != "the last places" else {key: value[:, -4:] for key, value in batch().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(made["input_ids"]), made)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_elementwise_operations_keep_the_vocabulary_split_and_others_do_not() -> None:
    for end, (_, shared) in ENDS.items():
        found = analyze_model(Net(end))
        assert found.shards_vocabulary(found.head) == shared, end
        assert (
            any(line.startswith(("head is not sharded: ", "table is not sharded: ")) for line in found.findings)
            != shared
        ), end
    assert "weights" in analyze_model(Net("by a parameter")).splits


FEW = {
    False: ["as they are", "log of softmax", "some words", "in rows of so many words"],
    True: ["capped", "by a parameter", "the last places"],
}
"""The cases that `make test` runs. False: with the loss over vocabulary shards. True: with a loss of the user."""


@pytest.mark.parametrize(
    ("own", "ends"),
    [
        *(pytest.param(own, FEW[own], id=f"{own}-few") for own in (False, True)),
        *(
            pytest.param(own, [end for end in ENDS if end not in FEW[own]], id=f"{own}-others", marks=pytest.mark.soak)
            for own in (False, True)
        ),
    ],
)
def test_every_use_of_logits_is_the_loss_of_one_device(ranks: Any, own: bool, ends: list[str]) -> None:
    found = ranks.run(2, train_all, own, ends)
    for end in ends:
        losses, model = alone(end, own)
        for on_rank in found:
            assert on_rank[end][0] == pytest.approx(losses, rel=1e-10), end
        for name, weight in model.named_parameters():
            assert torch.allclose(found[0][end][1][name], weight, rtol=1e-9, atol=1e-12), (end, name)


@pytest.mark.parametrize("table", [pytest.param(nn.Embedding, marks=pytest.mark.soak), Scaled, Normed, Limited])
def test_an_embedding_with_more_than_a_factor_on_its_output_is_not_split(ranks: Any, table: type[nn.Embedding]) -> None:
    assert analyze_model(Net("as they are", table)).shards_vocabulary("table") == TABLES[table]
    losses, model = alone("as they are", False, table)
    found = ranks.run(2, train, "as they are", False, table)
    assert all(on_rank[0] == pytest.approx(losses, rel=1e-10) for on_rank in found)
    for name, weight in model.named_parameters():
        assert torch.allclose(found[0][1][name], weight, rtol=1e-9, atol=1e-12), name
