"""The ends of a model, wherever they were registered and whatever does their work: a head before its model, a table
with a forward of its own, images
that a text comes without. Equal to one device under stages, ZeRO 3 and tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.block_lists import params_by_layer
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS, WIDTH, STEPS = 39, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Head(nn.Module):
    """Holds the bias of its decoder under two names, as RoBERTa's does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WORDS) / 10)
        self.norm, self.decoder = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.decoder.bias = self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(x))


class Table(nn.Module):
    """Looks up rows by itself, as I-BERT's does, and gives them with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.embedding(ids, self.weight), None


class Ranged(nn.Module):
    """Wants numbers in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training or not bool(x.isnan().any()), "what is to be ranged is no number"
        return x


class Begin(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.words, self.kinds, self.ranged = table, nn.Embedding(2, WIDTH), Ranged()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        return self.ranged((words[0] if isinstance(words, tuple) else words) + self.kinds(ids % 2))


class HeadFirst(nn.Module):
    shift_labels = False

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.head, self.begin, self.layers = Head(), Begin(table), nn.ModuleList(Block() for _ in range(2))
        self.head.decoder.weight = table.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.begin(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Seeing(nn.Module):
    """Reads images where there are any."""

    shift_labels = False

    def __init__(self) -> None:
        super().__init__()
        self.sight, self.table = nn.ModuleList(Block() for _ in range(3)), nn.Embedding(WORDS, WIDTH)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, images: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        if images is not None:
            for block in self.sight:
                images = block(images)
            x = torch.cat([images, x[:, images.shape[1] :]], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("text", "images"):
        return Seeing().double()
    return HeadFirst(nn.Embedding(WORDS, WIDTH) if name == "head first" else Table()).double()


def batch_of(name: str, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (4, 8), generator=random)
    images = {"images": torch.randn(4, 3, WIDTH, generator=random, dtype=torch.float64)} if name == "images" else {}
    return {"input_ids": ids, **images, "labels": ids.roll(-1, 1)}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def under(name: str, plan: str) -> Any:
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    trainer = parallelize(made(name), optimizer_of, plan, precision="fp64", example=example)
    losses = [trainer.step(batch_of(name, step)).loss for step in range(STEPS)]
    return losses, trainer.full_state_dict()


def alone(name: str) -> Any:
    model, losses = made(name), []
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        labels = (batch := batch_of(name, step)).pop("labels")
        loss = F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["pp2.mb2", "dp2.z3", "tp2"])
@pytest.mark.parametrize("name", ["head first", "own table", "text", "images"])
@pytest.mark.covering(2)
def test_ends_of_any_kind_and_order_are_equal_to_one_device(ranks, name: str, plan: str) -> None:
    losses, weights = ranks.run(2, under, name, plan)[0]
    expected, whole = alone(name)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert weights.keys() == whole.keys()
    assert all(torch.allclose(weights[key], value, rtol=1e-8, atol=1e-12) for key, value in whole.items())


def test_images_that_do_not_come_stand_with_what_begins_the_model() -> None:
    model = Seeing()
    found = analyze_model(model, example={"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    assert found.stacks == (("layers", 2),)
    assert "sight cannot be cut into pipeline stages: none of its blocks ran with input_ids (2, 8)" in found.findings
    assert [name for name in dict(params_by_layer(model, found))["front"] if name.startswith("sight.")] == [
        name for name, _ in model.named_parameters() if name.startswith("sight.")
    ]


def test_a_table_with_a_forward_of_its_own_is_the_embedding_and_stays_whole() -> None:
    found = analyze_model(made("own table"))
    assert (found.embedding, found.head, found.tied) == ("begin.words", "head.decoder", True)
    assert not found.shards_vocabulary("begin.words") and not found.shards_vocabulary("head.decoder")
