"""Experts are found by structure and proven with numbers, in unmodified families; what is not understood stays whole and is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.anatomy import read
from meshwright.anatomy.expert_modules import standing_in
from meshwright.anatomy.experts import add_experts
from meshwright.anatomy.nouns import Anatomy, Split
from meshwright.models.registry import build

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from mixtures import MIXTURES, build_mixture

FUSED = {"gate_up_proj": Split(1, (16, 16)), "down_proj": Split(2)}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.covering(4)
def test_the_experts_of_a_family_are_found(name: str) -> None:
    anatomy = read(build_mixture(name))
    dense = {"deepseek-v3": 1, "glm4-moe": 1}.get(name, 0)
    assert len(anatomy.experts) == anatomy.count - dense and {experts.count for experts in anatomy.experts} == {8}
    assert all(experts.counters for experts in anatomy.experts)
    if name not in ("gpt-oss", "dbrx", "llama4"):
        assert all(experts.splits == FUSED and experts.width == 16 for experts in anatomy.experts)


@pytest.mark.parametrize("kernels", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@pytest.mark.covering(3)
def test_experts_are_found_whichever_kernels_run_them(name: str, kernels: str) -> None:
    """Some give what lies in memory for the number of no expert."""
    model = build_mixture(name)
    model.config._experts_implementation = kernels
    assert len(read(model).experts) == len(read(build_mixture(name)).experts) > 0


def test_alternating_projections_with_biases_are_cut_together_and_a_bias_behind_them_is_added_once() -> None:
    experts = read(build_mixture("gpt-oss")).experts[0]
    assert experts.splits == {"gate_up_proj": Split(2), "gate_up_proj_bias": Split(1), "down_proj": Split(1)}
    assert experts.once == ("down_proj_bias",)


def test_experts_are_found_where_there_are_only_shapes() -> None:
    sizes = MIXTURES["mixture"][1]
    with torch.device("meta"):
        model = build(sizes)
    assert read(model).experts == read(build(sizes)).experts


def test_the_sequence_may_be_cut_around_experts_that_work_token_by_token() -> None:
    assert read(build_mixture("mixture")).against_sequence == ""
    assert "reads batch and sequence as one" in read(build_mixture("qwen2-moe")).against_sequence


class Crowd(nn.Module):
    """Its experts see how many tokens there are: what one gives is not its part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 6))
        self.down = nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = torch.einsum("nc,nkfc->nkf", hidden, self.up[index]).relu() / len(hidden)
        return (torch.einsum("nkf,nkcf->nkc", chosen, self.down[index]) * weights.unsqueeze(2)).sum(1)


def test_experts_that_mix_their_tokens_stay_whole_and_it_is_said() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Crowd()])
    found = add_experts(model, Anatomy("layers", 1), {"layers.0": torch.zeros(3, 6)})
    assert not found.experts
    (line,) = found.understood
    assert line.startswith("layers.0: 4 experts stay whole: what one computes is not its part of the sum (the output differs by ")


def test_standing_in_for_experts_leaves_the_model_as_it_was() -> None:
    model = build_mixture("mixture")
    ids = torch.arange(8).view(1, 8)
    before = model(ids).logits
    with standing_in(model):
        assert not torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_experts_are_found_also_where_the_model_cannot_be_run_by_its_shapes() -> None:
    model = build_mixture("mixture")
    seen = read(model)
    assert add_experts(model, Anatomy(seen.blocks, seen.count, seen.embedding), {}).experts == seen.experts
