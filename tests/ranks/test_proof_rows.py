"""One device's side of a proof requests large embeddings and heads in ranges of rows, never whole, and finds faults in
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import SIZES, VOCABULARY, make_batch, make_optimizer
from test_proof import trainer_of
from torch import nn

from meshwright.runtime.gather_service import ElementRange, GatherService
from meshwright.spec.record import ProofResult
from meshwright.train.proof import reference_run, streamed_weights
from meshwright.train.trainer import Trainer, parallelize

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def prove(trainer: Trainer, batch: dict[str, torch.Tensor]) -> tuple[ProofResult, dict[str, int], dict[str, int]]:
    """The proof where a range has 4096 elements; elements requested of each weight in ranges, and whole."""
    ranges, whole = Counter[str](), Counter[str]()
    weight_range, weights = GatherService.weight_range, GatherService.weights

    def count_range(self: GatherService, wanted: ElementRange, kind: torch.dtype) -> torch.Tensor:
        ranges[wanted.name] += wanted.stop - wanted.start
        assert wanted.stop - wanted.start <= 4096
        return weight_range(self, wanted, kind)

    def count_whole(self: GatherService, names: list[str], kind: torch.dtype) -> dict[str, torch.Tensor]:
        found = weights(self, names, kind)
        whole.update({name: tensor.numel() for name, tensor in found.items()})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_run, "MAX_PENDING_GRADIENT_ELEMENTS", 1)
        patch.setattr(streamed_weights, "COMPARE_CHUNK_ELEMENTS", 4096)
        patch.setattr(streamed_weights, "RANGE_ELEMENTS", 4096)
        patch.setattr(GatherService, "weight_range", count_range)
        patch.setattr(GatherService, "weights", count_whole)
        return trainer.prove(batch), dict(ranges), dict(whole)


def nothing(trainer: Trainer) -> None:
    """No fault."""


def proof_with(
    plant: Callable[[Trainer], None], plan: str, precision: str
) -> tuple[ProofResult, dict[str, int], dict[str, int]]:
    trainer = trainer_of("llama", plan, precision)
    plant(trainer)
    return prove(trainer, make_batch("llama", 0))


@pytest.mark.parametrize(
    ("plan", "precision"),
    [("dp2.z3", "fp64"), ("tp2", "fp64"), ("pp2", "fp64"), ("dp2.z1", "fp32"), ("dp2.z3", "bf16"), ("tp2.sp", "bf16")],
)
@pytest.mark.covering(1)
def test_embedding_and_head_come_in_ranges_and_never_whole(ranks: Any, plan: str, precision: str) -> None:
    proof, ranges, whole = ranks.run(2, proof_with, nothing, plan, precision)[0]
    assert proof.equal and not proof.notes, proof.to_json()
    assert ranges.keys() == {EMBEDDING, HEAD} and not ranges.keys() & whole.keys()
    assert len(ranges) + len(whole) == proof.parameters
    size = VOCABULARY * SIZES["hidden"]
    forwards = ranges[EMBEDDING] // size
    assert ranges == {EMBEDDING: forwards * size, HEAD: 2 * forwards * size}  # an embedding's backward needs no weight


def change(name: str) -> Callable[[Trainer], None]:
    def plant(trainer: Trainer) -> None:
        """The rows of this rank's part of a weight stand in another order, without a trace in the versions of
        tensors."""
        unit = next(unit for unit in trainer.engine.zero.units if name in unit.parameters)
        rows = unit.layout.view(unit.weights.full, name).data
        rows.copy_(rows.flip(0))

    return plant


def wrong_head(trainer: Trainer) -> None:
    change(HEAD)(trainer)


def wrong_embedding(trainer: Trainer) -> None:
    change(EMBEDDING)(trainer)


def scaled_gradient(path: str, factor: float, trainer: Trainer) -> None:
    """The gradient of a module's output is `factor` times what it should be."""

    def scale(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)

    trainer.engine.model.get_submodule(path).register_forward_hook(scale)


def scaled_embedding(trainer: Trainer) -> None:
    scaled_gradient("model.embed_tokens", 1.001, trainer)


def doubled_embedding(trainer: Trainer) -> None:
    scaled_gradient("model.embed_tokens", 2.0, trainer)


@pytest.mark.parametrize(
    ("plant", "plan", "precision", "place"),
    [
        (wrong_head, "tp2", "fp64", HEAD),
        pytest.param(wrong_embedding, "tp2", "fp64", EMBEDDING, marks=pytest.mark.soak),
        pytest.param(scaled_embedding, "dp2", "fp64", f"gradient of {EMBEDDING}", marks=pytest.mark.soak),
        (doubled_embedding, "tp2", "bf16", f"gradient of {EMBEDDING}"),
    ],
)
def test_a_fault_in_streamed_rows_is_found_and_named(
    ranks: Any, plant: Any, plan: str, precision: str, place: str
) -> None:
    proof, ranges, _ = ranks.run(2, proof_with, plant, plan, precision)[0]
    assert ranges and not proof.equal
    assert place in proof.line, proof.line


class TwoCalls(nn.Module):
    """The head runs twice in a pass, so that its gradient has two parts."""

    shift_labels = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks, self.head = (
            nn.Embedding(512, 16, padding_idx=3),
            nn.ModuleList([nn.Linear(16, 16)]),
            nn.Linear(16, 512),
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        return self.head(x) + 0.5 * self.head(x + self.blocks[0](x))


class OneCall(TwoCalls):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        return self.head(x + self.blocks[0](x))


def calls(model: type[nn.Module]) -> tuple[ProofResult, dict[str, int], dict[str, int]]:
    trainer = parallelize(model().double(), make_optimizer, "dp2.z1", precision="fp64", prove="start")
    ids = torch.randint(0, 512, (8, 16), generator=torch.Generator().manual_seed(1))
    ids[:, 4] = 3  # the padding row
    return prove(trainer, {"input_ids": ids, "labels": ids.clone()})


def test_a_head_that_runs_twice_comes_whole(ranks: Any) -> None:
    proof, _, whole = ranks.run(2, calls, TwoCalls)[0]
    assert proof.equal and "head.weight" in whole, proof.to_json()
    proof, ranges, whole = ranks.run(2, calls, OneCall)[0]
    assert proof.equal and ranges.keys() == {"table.weight", "head.weight"} and "head.bias" in whole, proof.to_json()
