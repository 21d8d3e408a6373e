"""Blocks that move buffers of their own on and read them, and blocks that models compute again themselves: gradients
bit for bit, or one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality import VOCABULARY, make_batch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.core.errors import InputError
from meshwright.runtime.activation_recompute import MutatedBuffers
from meshwright.train.trainer import parallelize

WIDTH = 16


class Block(nn.Module):
    """Its mean of what it was given so far moves in place, or is set anew; or it has none, and its attention is
    computed again by itself (`inside`)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down, self.read = (
            kind,
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
        )
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=kind != "hidden")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean((0, 1)) / 2
        if torch.is_grad_enabled() and self.kind == "set":
            self.mean = self.mean / 2 + now
        elif torch.is_grad_enabled() and self.kind in ("moved", "hidden"):
            self.mean.div_(2).add_(now)
        again = "inside" in self.kind and x.requires_grad
        x = x + (checkpoint(self.attention, x, use_reentrant=self.kind == "inside-old") if again else self.attention(x))
        x = x + self.down(F.silu(self.up(x + self.mean)))
        if self.kind == "func":
            return x + torch.func.vjp(lambda x: self.up(x).tanh(), x)[1](x)[0] / 8
        if self.kind not in ("forces", "slopes") or not x.requires_grad:
            return x
        (slope,) = torch.autograd.grad(
            self.down(self.up(x).tanh()).square().sum(), x, create_graph=self.kind == "forces"
        )
        return x + slope / 8

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.read(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True).transpose(1, 2).reshape(x.shape)


class Net(nn.Module):
    def __init__(self, kind: str, times: int = 1) -> None:
        super().__init__()
        self.words, self.head, self.times, self.kind = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
            times,
            kind,
        )
        self.layers = nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in [*self.layers] * self.times:
            again = "around" in self.kind and x.requires_grad and (self.training or self.kind == "around")
            x = checkpoint(layer, x, use_reentrant=self.kind == "around-old") if again else layer(x)
        return self.head(x)


def gradients(kind: str, plan: str, times: int = 1) -> dict[str, torch.Tensor] | str | None:
    """And the means behind the step."""
    torch.manual_seed(0)
    model = Net(kind, times)
    try:
        trainer = parallelize(model, torch.optim.AdamW, plan)
        found = trainer.gradients(make_batch("llama", 0))[2]
    except InputError as error:
        return str(error)
    return None if found is None else found | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    "around", ["dp1.mb4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp2.mb2", "dp2.z3.mb2"))]
)
@pytest.mark.parametrize("kind", [pytest.param("moved", marks=pytest.mark.soak), "set", "hidden"])
def test_what_is_made_again_reads_buffers_as_they_were_in_its_pass(ranks: Any, kind: str, around: str) -> None:
    world = 1 if around.startswith("dp1") else 2
    plain = ranks.once(world, gradients, kind, around)[0]
    for way in ("rc-full", "rc-sac", "rc-full1+sac.off-activations"):
        kept = ranks.run(world, gradients, kind, f"{around}.{way}")[0]
        assert plain.keys() == kept.keys() and all(torch.equal(plain[name], kept[name]) for name in plain), way


@pytest.mark.parametrize("way", ["rc-full", pytest.param("rc-sac", marks=pytest.mark.soak)])
def test_blocks_that_run_twice_in_a_pass_read_what_each_time_moved(ranks: Any, way: str) -> None:
    plain, kept = (
        ranks.once(1, gradients, "moved", "dp1.mb4", 2)[0],
        ranks.run(1, gradients, "moved", f"dp1.mb4.{way}", 2)[0],
    )
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


@pytest.mark.parametrize("kind", ["inside", "inside-old", "around"])
@pytest.mark.parametrize("way", ["rc-attn", "rc-sac", "rc-full", "off-activations"])
@pytest.mark.covering(2)
def test_models_that_checkpoint_themselves_train_under_every_recompute(ranks: Any, kind: str, way: str) -> None:
    plain, kept = ranks.once(1, gradients, kind, "dp1.mb4")[0], ranks.run(1, gradients, kind, f"dp1.mb4.{way}")[0]
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


def test_blocks_that_run_twice_or_are_called_again_in_backward_are_cut_by_no_stage(ranks: Any) -> None:
    """The second time through was left out, without a word."""
    for said in ranks.run(2, gradients, "moved", "pp2.mb2", 2):
        assert (
            said == "plan pp2.mb2: layers.0 runs more than once in a pass, but pipeline stages must begin and end "
            "between blocks: use pp1"
        )
    for said in ranks.run(2, gradients, "around", "pp2.mb2"):
        assert said.startswith(
            "plan pp2.mb2: layers.0 is recomputed in backward by the model's own activation checkpointing"
        )


@pytest.mark.parametrize("kind", ["around-trained", "around-old"])
def test_stages_are_refused_where_a_model_recomputes_its_blocks_in_training_only(ranks: Any, kind: str) -> None:
    """The analysis runs in training mode."""
    where = (
        "runs inside a custom autograd function or torch.no_grad"
        if kind == "around-old"
        else "is recomputed in backward by the model's own activation checkpointing"
    )
    for said in ranks.run(2, said_in_training, kind):
        assert said.startswith(f"plan pp2.mb4: layers.0 {where}"), said


def said_in_training(kind: str, plan: str = "pp2.mb4") -> str:
    """Before the first step, or of the first stage without the others."""
    torch.manual_seed(0)
    try:
        engine = parallelize(Net(kind), torch.optim.AdamW, plan).engine
        if engine.mesh.coords.pp:
            return ""
        engine.executor.forward_stage(0, {"input_ids": make_batch("llama", 0)["input_ids"]}, ())
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("kind", ["forces", pytest.param("slopes", marks=pytest.mark.soak)])
def test_gradients_taken_in_a_forward_are_not_deferred_weight_gradients(ranks: Any, kind: str) -> None:
    plain = ranks.once(1, gradients, kind, "dp1.mb4")[0]
    found = ranks.run(2, gradients, kind, "pp2.mb4")[0]
    assert all(torch.allclose(plain[name], found[name], atol=1e-6) for name in plain if not name.endswith("mean"))
    assert "computes gradients inside its forward" in ranks.run(2, said_in_training, kind, "pp2.mb4.zbh1")[0]


@pytest.mark.parametrize("way", ["rc-full", pytest.param("rc-sac", marks=pytest.mark.soak), "off-activations"])
def test_torch_func_gradients_in_a_block_are_refused_under_recompute_and_offload(ranks: Any, way: str) -> None:
    assert isinstance(ranks.once(1, gradients, "func", "dp1.mb4")[0], dict)
    assert ranks.run(1, gradients, "func", f"dp1.mb4.{way}")[0].startswith(
        "this block computes gradients with torch.func"
    )


class Frozen(nn.Module):
    """Its first layer drops nothing though the model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2))
        self.layers[0].eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_an_evaluation_leaves_every_module_the_mode_that_it_had(ranks: Any) -> None:
    assert ranks.run(1, modes) == [[True, False, True]]


def modes() -> list[bool]:
    model = Frozen()
    trainer = parallelize(model, torch.optim.AdamW, "dp1.mb8")
    trainer.evaluate(make_batch("llama", 0))
    return [module.training for module in (model, *model.layers)]


@pytest.mark.parametrize("kind", ["inside", pytest.param("inside-old", marks=pytest.mark.soak)])
def test_context_ranks_attend_inside_no_checkpoint_of_the_models_own(ranks: Any, kind: str) -> None:
    """It computed attention again of one rank's piece alone: another one's gradients, without a word."""
    for said in ranks.run(2, gradients, kind, "cp2.mb4"):
        assert said.startswith("cp: the model's own activation checkpointing would recompute attention")


def test_a_buffer_that_begins_to_move_later_is_refused() -> None:
    """Of the first pass all values are at hand, and of later ones those that are known to move."""

    def passes(layer: nn.BatchNorm1d) -> Iterator[list[str]]:
        moving = MutatedBuffers(layer)
        for training in (False, True):
            layer.train(training)
            before = moving.before()
            layer(torch.randn(4, 3))
            yield [each.name for each in moving.moved(before)]

    found = passes(nn.BatchNorm1d(3))
    assert next(found) == []
    with pytest.raises(
        InputError,
        match="the buffer num_batches_tracked of a block changes in a later forward but did not change in the first",
    ):
        next(found)
