"""What a live model is found to be, held against the closed formulas for the families that have them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from test_activations import SIZES
from test_intake_huggingface import CONFIGURATIONS

from meshwright.intake.architecture import model_spec
from meshwright.intake.huggingface import config_sizes
from meshwright.intake.sizes import Sizes
from meshwright.models.registry import build
from meshwright.probe import describe
from meshwright.spec.model import Layer, ModelSpec

torch.set_num_threads(1)
SEQUENCE = 32
ACCOUNT = (
    "numel",
    "repeat",
    "flops",
    "attention_flops",
    "saved_split",
    "saved_whole",
    "fixed_split",
    "fixed_whole",
    "core_fixed",
    "query_width",
    "key_value_width",
    "output",
    "tied",
)
DROPOUT = ("gpt2", "opt", "bert", "roberta")
"""Hugging Face's configurations with dropout: a mask of a byte each behind attention and feed-forward, which the formulas leave out."""

SEGMENT = 8
"""Bytes of the kind of segment of a token, an integer that the lookup keeps and the formulas leave out."""


def account(layer: Layer) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ACCOUNT}


def by_name(spec: ModelSpec) -> dict[str, Layer]:
    return {layer.name: layer for layer in spec.layers}


def reference(kind: str) -> tuple[ModelSpec, ModelSpec]:
    """A reference model as it is found and as the formulas have it."""
    sizes = Sizes.model_validate({**SIZES[kind], "layers": 3, "seq": 64})
    return describe(lambda: build(sizes.model_dump()), SEQUENCE, name=kind), model_spec(kind, sizes)


def hugging_face(kind: str, **changes: Any) -> tuple[ModelSpec, ModelSpec]:
    """The same of a Hugging Face configuration."""
    config = transformers.AutoConfig.for_model(kind, **CONFIGURATIONS[kind], **changes)
    builder = transformers.AutoModelForMaskedLM if kind in ("bert", "roberta") else transformers.AutoModelForCausalLM
    return describe(lambda: builder.from_config(config), SEQUENCE, name=kind), model_spec(kind, config_sizes(config.to_dict(), kind))


@pytest.mark.parametrize("kind", SIZES)
def test_a_reference_model_is_found_to_be_what_the_formulas_say(kind: str) -> None:
    found, formula = reference(kind)
    expected = {layer.name: account(layer) for layer in formula.layers}
    if kind == "bert":
        expected["front"]["fixed_whole"] += SEGMENT
    assert {layer.name: account(layer) for layer in found.layers} == expected
    assert (found.parameters, found.hidden, found.vocabulary) == (formula.parameters, formula.hidden, formula.vocabulary)
    assert (found.context, found.divisible, found.tensor_parallel) == (formula.context, formula.divisible, formula.tensor_parallel)


@pytest.mark.parametrize("kind", SIZES)
def test_parameters_carry_the_names_shapes_and_cuts_of_the_formulas(kind: str) -> None:
    found, formula = (by_name(spec) for spec in reference(kind))
    for name, layer in formula.items():
        for parameter in layer.parameters:
            path = "" if name == "block" else r"(.*\.)?"
            (mine,) = (own for own in found[name].parameters if re.fullmatch(path + re.escape(parameter.name), own.name))
            assert (mine.shape, mine.split) == (parameter.shape, parameter.split)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt_neox", *DROPOUT])
def test_a_hugging_face_block_keeps_and_computes_what_the_formulas_say(kind: str) -> None:
    found, formula = (by_name(spec) for spec in hugging_face(kind))
    masks = 2.0 * found["block"].output if kind in DROPOUT else 0.0
    expected = account(formula["block"])
    expected["fixed_whole"] += masks
    assert account(found["block"]) == expected


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text", "falcon", "bloom", "stablelm", "deepseek_v3", "mixtral"])
def test_every_family_computes_the_matrix_products_of_its_formulas(kind: str) -> None:
    """Their attention may run otherwise here than a fused kernel does, with a mask or in full, and is counted as it runs."""
    found, formula = hugging_face(kind)
    assert found.parameters == formula.parameters
    assert total(found, "flops") == total(formula, "flops")
    assert total(found, "attention_flops") in (total(formula, "attention_flops"), 2 * total(formula, "attention_flops"))


def total(spec: ModelSpec, field: str) -> float:
    return sum(layer.repeat * getattr(layer, field) for layer in spec.layers)
