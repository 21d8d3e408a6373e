"""Experts are found by structure and proven with numbers, in unmodified families; what is not understood stays whole
and is said."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.expert_modules import pass_through_experts
from meshwright.analysis.experts import add_experts
from meshwright.analysis.graph import ModelGraph, TpSplit
from meshwright.models.registry import build_reference_model

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from moe_models import MIXTURES, build_mixture


@cache
def analyzed(name: str) -> ModelGraph:
    """Returns the analysis of the mixture-of-experts model `name`. Several tests share it."""
    return analyze_model(build_mixture(name))


FUSED = {"gate_up_proj": TpSplit(1, (16, 16)), "down_proj": TpSplit(2)}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.covering(1)
def test_the_experts_of_a_family_are_found(name: str) -> None:
    anatomy = analyzed(name)
    dense = {"deepseek-v3": 1, "glm4-moe": 1}.get(name, 0)
    assert len(anatomy.experts) == anatomy.count - dense and {experts.count for experts in anatomy.experts} == {8}
    assert all(experts.count_attributes for experts in anatomy.experts)
    if name not in ("gpt-oss", "dbrx", "llama4"):
        assert all(experts.splits == FUSED and experts.width == 16 for experts in anatomy.experts)


@pytest.mark.parametrize("kernels", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@pytest.mark.covering(1)
def test_experts_are_found_whichever_kernels_run_them(name: str, kernels: str) -> None:
    """Some give what lies in memory for the number of no expert."""
    model = build_mixture(name)
    model.config._experts_implementation = kernels
    assert len(analyze_model(model).experts) == len(analyzed(name).experts) > 0


def test_alternating_projections_are_split_and_their_output_bias_is_added_once() -> None:
    experts = analyzed("gpt-oss").experts[0]
    assert experts.splits == {"gate_up_proj": TpSplit(2), "gate_up_proj_bias": TpSplit(1), "down_proj": TpSplit(1)}
    assert experts.replicated == ("down_proj_bias",)


def test_experts_are_found_where_there_are_only_shapes() -> None:
    sizes = MIXTURES["mixture"][1]
    with torch.device("meta"):
        model = build_reference_model(sizes)
    assert analyze_model(model).experts == analyzed("mixture").experts


def test_the_sequence_may_be_cut_around_experts_that_work_token_by_token() -> None:
    assert analyzed("mixture").against_sequence == ""
    assert "reads batch and sequence as one" in analyzed("qwen2-moe").against_sequence


def test_experts_whose_smallest_copy_is_too_large_to_verify_are_refused_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.analysis.verify_experts.MAX_RANDOM_PARAMS", 10)
    anatomy = analyze_model(build_mixture("mixtral"))
    assert not anatomy.experts and "more than 10 elements, too many to verify" in anatomy.unsupported["experts"]


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
    found = add_experts(model, ModelGraph("layers", 1), {"layers.0": torch.zeros(3, 6)})
    assert not found.experts
    (line,) = found.findings
    assert line.startswith(
        "layers.0: 4 experts are not sharded: the check with simulated ranks failed (the output differs by "
    )


def test_standing_in_for_experts_leaves_the_model_as_it_was() -> None:
    model = build_mixture("mixture")
    ids = torch.arange(8).view(1, 8)
    before = model(ids).logits
    with pass_through_experts(model):
        assert not torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_experts_are_found_also_where_the_model_cannot_be_run_by_its_shapes() -> None:
    model, seen = build_mixture("mixture"), analyzed("mixture")
    assert add_experts(model, ModelGraph(seen.blocks, seen.count, seen.embedding), {}).experts == seen.experts
