"""Faults that are planted after `parallelize`, each a way in which a plan could train another model: the proof finds
each and names the place.

`make soak` plants all of them on four ranks, and writes what the proof says to bench/results/proof_faults.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.planted_faults import (
    BLOCK,
    Fault,
    block_in_bfloat16,
    change_output,
    detached_block,
    frozen_by_mistake,
    here,
    lost_all_reduce_of_a_norm,
    lost_gradient_of_a_replica,
    lost_label,
    lost_residual,
    mean_of_means,
    reversed_gradient,
    skipped_micro_batch,
    wrong_label_shift,
    wrong_positions,
    wrong_shard_of_a_column,
)
from equality import make_batch, make_optimizer
from pool import RankFailure
from test_proof import trainer_of
from torch import nn

from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.record import ProofResult
from meshwright.train.proof.recorded_pass import OutputDigest
from meshwright.train.trainer import Trainer, parallelize

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def module_of(trainer: Trainer, path: str) -> nn.Module:
    return trainer.engine.model.get_submodule(path)


def weight(trainer: Trainer, name: str) -> tuple[FlatParamGroup, torch.Tensor]:
    """The unit of a parameter, and this rank's copy of it."""
    unit = next(unit for unit in trainer.engine.zero.units if name in unit.parameters)
    return unit, unit.layout.view(unit.weights.full, name)


# --- faults
# -------------------------------------------------------------------------------------------------------------------


def wrong_order_of_heads(trainer: Trainer) -> None:
    own = weight(trainer, f"{BLOCK}.self_attn.q_proj.weight")[1]
    own.data.copy_(own.roll(16, 0))


def flipped_bit(trainer: Trainer) -> None:
    """In the copy of one replica; the highest bit of the mantissa."""
    if here(trainer):
        own = weight(trainer, f"{BLOCK}.mlp.down_proj.weight")[1].view(-1)
        own.view(torch.int64)[7] ^= 1 << 51


def stale_tied_weight(trainer: Trainer) -> None:
    """The last stage has the weight of a step before."""
    if here(trainer):
        with torch.no_grad():
            next(
                unit for unit in trainer.engine.zero.units if "model.embed_tokens.weight" in unit.parameters
            ).weights.full.mul_(0.99)


def swapped_blocks(trainer: Trainer) -> None:
    one, other = (module_of(trainer, f"model.layers.{index}") for index in (1, 2))
    one.forward, other.forward = other.forward, one.forward  # type: ignore[method-assign]


def doubled_bias(trainer: Trainer) -> None:
    module = module_of(trainer, "transformer.h.1.mlp.c_proj")
    module.register_forward_hook(lambda module, args, output: output + module.bias)


def scaled_gradient_of_a_replica(trainer: Trainer) -> None:
    if here(trainer):
        unit, _ = weight(trainer, f"{BLOCK}.mlp.down_proj.weight")
        unit.parameters[f"{BLOCK}.mlp.down_proj.weight"].register_hook(lambda gradient: gradient * 1.01)


def norm_of_a_slice(trainer: Trainer) -> None:
    if here(trainer):
        change_output(trainer, f"{BLOCK}.input_layernorm", lambda given, output: output * 1.0001)


FAULTS: tuple[tuple[Fault, str, str, str], ...] = (
    (wrong_shard_of_a_column, "llama", "tp2", f"{BLOCK}.mlp.up_proj"),
    (wrong_order_of_heads, "llama", "tp2", f"{BLOCK}.self_attn.q_proj"),
    (flipped_bit, "llama", "dp2", f"{BLOCK}.mlp"),
    (block_in_bfloat16, "llama", "dp2", f"{BLOCK}.mlp"),
    (stale_tied_weight, "llama-tied", "pp2", "lm_head"),
    (swapped_blocks, "llama", "dp2", f"{BLOCK}."),
    (lost_residual, "llama", "pp2", f"{BLOCK}.mlp"),
    (doubled_bias, "gpt2", "tp2", "transformer.h.1.mlp.c_proj"),
    (lost_all_reduce_of_a_norm, "llama", "tp2.sp", "norm"),
    (scaled_gradient_of_a_replica, "llama", "dp2", f"{BLOCK}.mlp.down_proj.weight"),
    (lost_gradient_of_a_replica, "llama", "dp2.z3", "model.norm.weight"),
    (skipped_micro_batch, "llama", "dp2", "embed_tokens"),
    (mean_of_means, "llama", "dp2", "the loss"),
    (wrong_label_shift, "llama", "dp2", "the loss"),
    (lost_label, "llama", "tp2", "labels"),
    (detached_block, "llama", "pp2", f"{BLOCK}.mlp"),
    (reversed_gradient, "llama", "dp2.z1", f"{BLOCK}.mlp"),
    (wrong_positions, "llama", "cp2", f"{BLOCK}.self_attn"),
    (norm_of_a_slice, "llama", "tp2.sp", f"{BLOCK}.input_layernorm"),
)


def proof_with(plant: Fault, name: str, plan: str) -> ProofResult:
    trainer = trainer_of(name, plan)
    plant(trainer)
    return trainer.prove(make_batch(name, 0))


@pytest.mark.parametrize(("plant", "name", "plan", "place"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
@pytest.mark.covering(2)
def test_a_planted_fault_is_found_and_its_place_named(
    ranks: Any, plant: Fault, name: str, plan: str, place: str
) -> None:
    proof = ranks.run(2, proof_with, plant, name, plan)[0]
    assert not proof.equal
    assert place in proof.line, proof.line


@pytest.mark.parametrize("plan", ["dp2", "dp2.z3"])
def test_a_parameter_that_one_rank_alone_has_frozen_is_refused_on_all(ranks: Any, plan: str) -> None:
    with pytest.raises(RankFailure, match=r"model\.norm\.weight is frozen on ranks 1 and trained on others"):
        ranks.run(2, proof_with, frozen_by_mistake, "llama", plan)


def test_a_digest_shows_rounding_whose_errors_cancel_in_sums() -> None:
    exact = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    digest, noise = OutputDigest().plus(exact), 1e-6 * torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    assert digest.difference(OutputDigest().plus(exact.bfloat16().double()), 1.0) > 3e-4
    assert digest.difference(OutputDigest().plus(exact + noise), 1.0) < 1e-6
    assert digest.difference(OutputDigest().plus(exact).plus(exact), 2.0) == 0.0


class Parted(nn.Module):
    """Statistics that do not move, and two experts: the words of each are its own."""

    shift_labels = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16).eval()
        self.experts, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 32)

    def train(self, mode: bool = True) -> Parted:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.table(input_ids).transpose(1, 2)).transpose(1, 2)
        even = (input_ids % 2 == 0)[..., None]
        return self.head(x + torch.where(even, self.experts[0](x), self.experts[1](x)))


def other_running_mean(trainer: Trainer) -> None:
    if here(trainer):
        module_of(trainer, "norm").running_mean.add_(0.01)  # type: ignore[union-attr, operator]


def unreached_expert(trainer: Trainer) -> None:
    change_output(trainer, "experts.1", lambda given, output: output.detach())


def parted(plant: Fault, plan: str) -> ProofResult:
    trainer = parallelize(Parted().double(), make_optimizer, plan, precision="fp64", prove="start")
    plant(trainer)
    ids = torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(1))
    return trainer.prove({"input_ids": ids, "labels": ids.clone()})


PARTED_FAULTS: tuple[tuple[Fault, str, str], ...] = (
    (other_running_mean, "dp2", "first at norm:"),
    (unreached_expert, "dp2.z1", "experts.1.weight and 1 more get a gradient only on one device"),
)


@pytest.mark.parametrize(("plant", "plan", "place"), PARTED_FAULTS)
def test_a_fault_of_a_saved_buffer_or_an_expert_is_found_and_its_place_named(
    ranks: Any, plant: Fault, plan: str, place: str
) -> None:
    proof = ranks.run(2, parted, plant, plan)[0]
    assert not proof.equal
    assert place in proof.line, proof.line


def on_four(plan: str) -> str:
    """The plan on twice as many replicas.

    >>> on_four("dp2.z3"), on_four("tp2.sp"), on_four("pp2")
    ('dp4.z3', 'dp2.tp2.sp', 'dp2.pp2')
    """
    return plan.replace("dp2", "dp4") if plan.startswith("dp2") else f"dp2.{plan}"


@pytest.mark.soak
def test_every_planted_fault_is_found_on_four_ranks_and_tabled(ranks: Any) -> None:
    jobs = [(plant, on_four(plan), place, (proof_with, plant, name)) for plant, name, plan, place in FAULTS]
    jobs += [(plant, on_four(plan), place, (parted, plant)) for plant, plan, place in PARTED_FAULTS]
    lines, missed = [], []
    for plant, plan, place, call in jobs:
        proof = ranks.run(4, *call, plan)[0]
        is_found = not proof.equal and place in proof.line
        missed += [] if is_found else [f"{plant.__name__} under {plan}: {proof.line or 'equal'}"]
        said = proof.line.replace("|", "/") if is_found else f"NOT FOUND: {proof.line or 'equal'}"
        lines.append(f"| {plant.__name__.replace('_', ' ')} | `{plan}` | {said} | {proof.seconds:.2f} |")
    head = [
        "# Planted faults that the proof finds",
        "",
        f"Written by `make soak`: {len(jobs)} faults, each planted after `parallelize` on 4 ranks; small models in "
        f"float64. {len(jobs) - len(missed)} found, with their places.",
        "",
        "| fault | plan | what the proof says | seconds |",
        "|---|---|---|---|",
    ]
    (RESULTS / "proof_faults.md").write_text("\n".join([*head, *lines]) + "\n")
    assert not missed
