"""A model that was only looked at is the model of before: what its forward writes in eval mode does not stay."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.analysis.dry_run import dry_run
from meshwright.runtime.pipeline.block_wrapper import trace_boundaries

WORDS, WIDTH = 39, 16


class Block(nn.Module):
    """Notes how many tokens it may take from the first batch in eval mode, counts its calls, keeps a table of positions
    and hangs up a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.capacity = 1000
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.capacity = x.shape[0] * x.shape[1]
            self.table = torch.arange(x.shape[1], device=x.device)
            self.calls += 1
            self.register_forward_hook(lambda *_: None)
        return x + self.down(torch.relu(self.up(x))) + bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        bias = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


def test_what_a_forward_writes_while_it_is_looked_at_does_not_stay() -> None:
    model = Net().train()
    model.layers[1].eval()
    with dry_run(model):
        model(torch.zeros(2, 7, dtype=torch.long))
        assert model.layers[0].capacity == 14
    anatomy = analyze_model(model)
    assert anatomy.extra_block_args == ("bias",)
    assert trace_boundaries(record_dataflow(model, anatomy.block_paths), anatomy).is_more
    for layer, training in zip(model.layers, (True, False), strict=True):
        assert (layer.capacity, layer.training, float(layer.calls), hasattr(layer, "table")) == (
            1000,
            training,
            0.0,
            False,
        )
        assert not layer._forward_hooks
