"""The analysis run: in the modes that the model trains in, with numbers where its code needs them, and a refusal where
it cannot be made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.analysis.dataflow import TracedOp
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.core.errors import InputError

WORDS, WIDTH = 11, 4
BLOCKS = tuple(f"layers.{index}" for index in range(3))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.head, self.drop = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        if self.kind == "file":
            raise FileNotFoundError("words.txt")
        if self.kind == "network":
            try:
                raise ConnectionRefusedError("no server")
            except OSError as error:
                raise RuntimeError("no table") from error
        if self.kind == "shape":
            raise ValueError("too short")
        if self.kind == "numbers":
            assert input_ids.unique().numel() == len(set(input_ids.flatten().tolist()))
        for layer in self.layers:
            x = layer(x)
            if self.training and self.kind == "training":
                x = self.drop(x)
                self.calls += 1
            if self.kind == "random" and self.training and random.random() < 0.5:
                x = layer(x)
        return self.head(x)


def names_between(model: nn.Module) -> list[str]:
    return [
        event.name
        for event in record_dataflow(model, BLOCKS).events
        if isinstance(event, TracedOp) and event.block < 0 and 0 < event.blocks_begun < 3
    ]


def test_code_of_training_alone_is_seen_and_leaves_the_model_as_it_was() -> None:
    model = Net("training")
    assert "dropout" in names_between(model)
    assert "dropout" not in names_between(model.eval())
    assert float(model.calls) == 0 and not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    assert all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())


def test_a_forward_that_needs_numbers_is_run_with_numbers() -> None:
    assert record_dataflow(Net("numbers"), BLOCKS).calls == (0, 1, 2)


def test_a_forward_that_cannot_run_is_refused_with_its_reason_and_a_remedy() -> None:
    with pytest.raises(InputError, match=r"the model was not analysed.*ValueError: too short.*example=") as said:
        record_dataflow(Net("shape"), BLOCKS)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(("kind", "error"), [("file", "FileNotFoundError: words.txt"), ("network", "RuntimeError: no")])
def test_a_forward_that_fails_to_read_is_refused_with_its_line_and_a_remedy(kind: str, error: str) -> None:
    with pytest.raises(InputError, match=rf"fails to read .* in {Path(__file__).name}, line \d+ \({error}") as said:
        record_dataflow(Net(kind), BLOCKS)
    assert "\n" not in str(said.value)
    assert "make what the forward reads available on every rank" in str(said.value) and "example" not in str(said.value)


def test_blocks_called_differently_by_seed_are_noted_and_generators_are_unchanged() -> None:
    model = Net("random")
    state, drawn = random.getstate(), torch.random.get_rng_state()
    record = record_dataflow(model, BLOCKS)
    assert record.obstacle is not None and record.obstacle[0] == "random"
    assert random.getstate() == state and torch.equal(torch.random.get_rng_state(), drawn)
