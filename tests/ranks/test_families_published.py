"""What is found by structure in every family, beside the tensor-parallel plan that transformers' configurations carry:
the same layers, or a reason."""

from __future__ import annotations

import re

import pytest
from model_families import FAMILIES, build_family
from test_families import IN_PART, anatomy_of
from torch import nn

pytest.importorskip("transformers")
COLUMNS, ROWS = (
    ("colwise", "packed_colwise", "colwise_gather_output"),
    ("rowwise", "packed_rowwise", "rowwise_split_input"),
)

EXPLAINED = {
    "olmo2": "a norm over all heads together: they gather in front of it, here the attention stays whole",
    "deepseek-v3": "latent attention, which they leave whole, is shared by heads here",
}
"""Families that differ, and why."""


@pytest.mark.soak
def test_every_family_is_cut_at_attention_and_feed_forward_or_says_what_stays_whole() -> None:
    for name in FAMILIES:
        found = anatomy_of(name)
        assert len(found.regions) == IN_PART.get(name, 4), (name, found.findings)
        whole = any("are not sharded" in line for line in found.findings)
        assert whole == (name in IN_PART and name not in ("t5", "albert")), (name, found.findings)


def differing(name: str) -> dict[str, tuple[str | None, str | None]] | None:
    """Layers inside the blocks of which theirs and ours say otherwise; None without a plan of theirs."""
    model, found = build_family(name), anatomy_of(name)
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not plan:
        return None
    styles = {
        re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", "[^.]+")): style for pattern, style in plan.items()
    }
    kinds = {path: "column" for region in found.regions for path in region.columns}
    kinds |= {path: "row" for region in found.regions for path in region.rows}
    result = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(path.startswith(f"{cut}.") for cut in found.block_paths):
            style = next((style for pattern, style in styles.items() if pattern.fullmatch(path)), None)
            theirs = "column" if style in COLUMNS else "row" if style in ROWS else None
            if theirs != kinds.get(path):
                result[path] = (theirs, kinds.get(path))
    return result


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_published_tp_plan_agrees_or_the_difference_has_a_reason(name: str) -> None:
    layers = differing(name)
    assert layers is not None, "a plan of theirs"
    assert bool(layers) == (name in EXPLAINED), layers


@pytest.mark.soak
def test_published_tp_plans_agree_or_the_difference_has_a_reason() -> None:
    found = {name: differing(name) for name in FAMILIES}
    with_plan = {name: layers for name, layers in found.items() if layers is not None}
    assert len(with_plan) >= 20
    assert {name for name, layers in with_plan.items() if layers} == set(EXPLAINED), {
        k: v for k, v in with_plan.items() if v
    }
