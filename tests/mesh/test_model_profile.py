"""What a live model is found to be, held against the closed formulas for the families that have them."""

from __future__ import annotations

import re
import resource
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from test_activation_bytes import SIZES
from test_inputs_huggingface import CONFIGURATIONS
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.analysis.profile.model_spec import describe
from meshwright.core.errors import InputError
from meshwright.models.convnet import ConvNet, ConvNetConfig
from meshwright.models.registry import build_reference_model
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes, sizes_from_hf_config
from meshwright.planner.inputs.model_parser import read_model
from meshwright.spec.model import LayerSpec, ModelSpec

torch.set_num_threads(1)
SEQUENCE = 32
ACCOUNT = (
    "numel",
    "repeat",
    "flops",
    "attention_flops",
    "derived_split",
    "derived_whole",
    "derived_fixed_split",
    "derived_fixed_whole",
    "fused_split",
    "fused_gates",
    "fused_whole",
    "fused_fixed_split",
    "fused_fixed_whole",
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
"""Hugging Face's configurations with dropout: a mask of a byte each behind attention and feed-forward, which the
formulas leave out."""

SEGMENT = 8
"""Bytes of the kind of segment of a token, an integer that the lookup keeps and the formulas leave out."""


def account(layer: LayerSpec) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ACCOUNT}


def by_name(spec: ModelSpec) -> dict[str, LayerSpec]:
    return {layer.name: layer for layer in spec.layers}


SOME_KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind != "bert")) for kind in SIZES]
)


@cache
def reference(kind: str) -> tuple[ModelSpec, ModelSpec]:
    """A reference model as it is found and as the formulas have it."""
    sizes = ArchitectureSizes.model_validate({**SIZES[kind], "layers": 3, "seq": 64})
    return describe(lambda: build_reference_model(sizes.model_dump()), SEQUENCE, name=kind), model_spec(kind, sizes)


@cache
def hugging_face(kind: str) -> tuple[ModelSpec, ModelSpec]:
    """The same of a Hugging Face configuration."""
    config = transformers.AutoConfig.for_model(kind, **CONFIGURATIONS[kind])
    builder = transformers.AutoModelForMaskedLM if kind in ("bert", "roberta") else transformers.AutoModelForCausalLM
    return describe(lambda: builder.from_config(config), SEQUENCE, name=kind), model_spec(
        kind, sizes_from_hf_config(config.to_dict(), kind)
    )


@SOME_KINDS
def test_a_reference_model_is_found_to_be_what_the_formulas_say(kind: str) -> None:
    found, formula = reference(kind)
    expected = {layer.name: account(layer) for layer in formula.layers}
    if kind == "bert":
        expected["front"]["fixed_whole"] += SEGMENT
    assert {layer.name: account(layer) for layer in found.layers} == expected
    assert (found.parameters, found.hidden, found.vocabulary) == (
        formula.parameters,
        formula.hidden,
        formula.vocabulary,
    )
    assert (found.context, found.divisible, found.tensor_parallel) == (
        formula.context,
        formula.divisible,
        formula.tensor_parallel,
    )


@SOME_KINDS
def test_parameters_carry_the_names_shapes_and_cuts_of_the_formulas(kind: str) -> None:
    found, formula = (by_name(spec) for spec in reference(kind))
    for name, layer in formula.items():
        for parameter in layer.parameters:
            path = "" if name == "block" else r"(.*\.)?"
            (mine,) = (
                own for own in found[name].parameters if re.fullmatch(path + re.escape(parameter.name), own.name)
            )
            assert (mine.shape, mine.split) == (parameter.shape, parameter.split)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in ("mistral", "qwen2", "qwen3", "smollm3", "gpt_neox", *DROPOUT)
        ),
    ],
)
def test_a_hugging_face_block_keeps_and_computes_what_the_formulas_say(kind: str) -> None:
    found, formula = (by_name(spec) for spec in hugging_face(kind))
    masks = 2.0 * found["block"].output if kind in DROPOUT else 0.0
    expected = account(formula["block"])
    expected["fixed_whole"] += masks
    assert account(found["block"]) == expected


@pytest.mark.parametrize(
    "kind", ["gemma", "gemma2", "gemma3_text", "falcon", "bloom", "stablelm", "deepseek_v3", "mixtral"]
)
@pytest.mark.covering(1)
def test_every_family_computes_the_matrix_products_of_its_formulas(kind: str) -> None:
    """Their attention may run otherwise here than a fused kernel does, with a mask or in full, and is counted as it
    runs."""
    found, formula = hugging_face(kind)
    assert found.parameters == formula.parameters
    assert total(found, "flops") == total(formula, "flops")
    assert total(found, "routed") == total(formula, "routed")
    assert total(found, "attention_flops") in (total(formula, "attention_flops"), 2 * total(formula, "attention_flops"))


@pytest.mark.soak
def test_experts_are_found_alike_whatever_the_precision() -> None:
    """Torch knows the shapes of grouped products in bf16 alone."""
    config = transformers.AutoConfig.for_model("mixtral", **CONFIGURATIONS["mixtral"])
    found = [
        describe(lambda: transformers.AutoModelForCausalLM.from_config(config), SEQUENCE, precision=each)
        for each in ("fp32", "bf16")
    ]
    assert found[0].layers == found[1].layers


def total(spec: ModelSpec, field: str) -> float:
    return sum(layer.repeat * getattr(layer, field) for layer in spec.layers)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("CausalLM", {**CONFIGURATIONS["llama"], "pad_token_id": 0}),
    "olmo": ("CausalLM", CONFIGURATIONS["llama"]),
    "cohere": ("CausalLM", CONFIGURATIONS["llama"]),
    "starcoder2": ("CausalLM", CONFIGURATIONS["llama"]),
    "mpt": ("CausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 96}),
    "gpt_oss": ("CausalLM", {**CONFIGURATIONS["mixtral"], "head_dim": 16}),
    "mamba": ("CausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4}),
    "albert": ("MaskedLM", {**CONFIGURATIONS["bert"], "embedding_size": 32}),
    "distilbert": ("MaskedLM", {"dim": 64, "hidden_dim": 160, "n_layers": 3, "n_heads": 4, "vocab_size": 96}),
    "t5": ("Seq2SeqLM", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 96}),
    "bart": (
        "Seq2SeqLM",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 96, "decoder_ffn_dim": 160},
    ),
    "vit": ("ImageClassification", {**CONFIGURATIONS["bert"], "image_size": 32, "patch_size": 8}),
    "resnet": ("ImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]}),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind != "vit")) for kind in FAMILIES])
def test_a_family_without_formulas_is_found_whole(kind: str) -> None:
    """Every parameter once, work and kept bytes in every block; a sample is one token where the model reads no ids."""
    task, sizes = FAMILIES[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    builder = getattr(transformers, f"AutoModelFor{task}")
    found = describe(lambda: builder.from_config(config), SEQUENCE, name=kind)
    with torch.device("meta"):
        assert found.parameters == sum(parameter.numel() for parameter in builder.from_config(config).parameters())
    blocks = [layer for layer in found.layers if layer.name == "block"]
    assert blocks and all(layer.flops > 0 and layer.output > 0 and layer.transient > 0 for layer in blocks)
    assert all(layer.saved_split + layer.saved_whole > layer.output for layer in blocks)
    assert (found.context == 1) == (task == "ImageClassification")


def test_flops_are_those_that_torch_counts_with_half_of_causal_attention() -> None:
    """torch counts attention in full, on a run that it does itself."""
    config = transformers.AutoConfig.for_model("llama", **CONFIGURATIONS["llama"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, SEQUENCE, dtype=torch.long), use_cache=False)
    found = hugging_face("llama")[0]
    assert counter.get_total_flops() / SEQUENCE == total(found, "flops") + 2 * SEQUENCE * total(
        found, "attention_flops"
    )


class Own(nn.Module):
    """Two parts and no list of blocks; dropout, a table that every part reads, frozen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.5)
        self.dummy_inputs = {"features": torch.zeros(3, 8), "labels": torch.zeros(3)}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(features))))


def test_a_model_without_blocks_is_found_child_by_child_and_stays_whole() -> None:
    found = describe(Own)
    first, second = found.layers
    assert (first.name, second.name, found.blocks, found.tensor_parallel, found.context) == (
        "first",
        "second",
        0,
        False,
        1,
    )
    assert (first.flops, second.flops) == (2 * 8 * 32, 2 * 32 * 8)
    assert (first.saved_whole, first.fixed_whole) == (8 + 32, 32)  # the features, relu's result, a mask of one byte
    assert (second.saved_whole, second.fixed_whole) == (32, 4 * 8 + 10)  # dropout's result, what the loss keeps


def test_dropout_costs_its_masks_and_leaves_attention_fused() -> None:
    def make(dropout: float) -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 160, dropout, batch_first=True)
        return nn.Sequential(
            nn.Embedding(96, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 96)
        )

    dry, wet = (by_name(describe(partial(make, dropout), SEQUENCE))["block"] for dropout in (0.0, 0.1))
    masks = 64 + 160 + 64
    assert wet.fixed_whole + wet.fixed_split == dry.fixed_whole + dry.fixed_split + masks
    assert (
        wet.saved_whole + wet.saved_split == dry.saved_whole + dry.saved_split + 160
    )  # relu's result and what dropout makes of it
    assert wet.query_width == dry.query_width == 64


def test_a_live_model_stays_as_it_is() -> None:
    model = build_reference_model(ArchitectureSizes.model_validate({**SIZES["gpt2"], "layers": 2}).model_dump()).eval()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    describe(model, 16)
    assert not model.training and not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1]) and tensor.grad is None


@pytest.mark.parametrize("layers", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_layers_of_a_large_model_take_no_memory(layers: int) -> None:
    """Eight layers are a tenth of Llama 3 70B: 36 GB of weights and, at this batch size, 60 GB of activations."""
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, formula = (
        describe(lambda: transformers.AutoModelForCausalLM.from_config(config), 4096),
        read_model("llama3-70b"),
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert account(by_name(found)["block"]) == {**account(by_name(formula)["block"]), "repeat": layers}


class Asking(nn.Module):
    """A forward that asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.out(x if x.sum() > 0 else -x)


def broken() -> nn.Module:
    raise RuntimeError("weights.bin is missing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Asking, r"cannot be traced with input \(rows, 256\) \(its forward asks for the values of a tensor"),
        (broken, r"cannot be built \(RuntimeError: weights.bin is missing\): run its function by itself"),
        (
            lambda: nn.Bilinear(4, 3, 2),
            r"cannot be traced with input .*; give it an attribute dummy_inputs with its inputs",
        ),
        (nn.ReLU, r"has no parameters"),
    ],
)
def test_what_cannot_be_found_is_one_line_with_a_way_out(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        describe(make, name="mine:build")
    assert "\n" not in str(caught.value)


class Pairs(nn.Module):
    """A contrast: every row beside every other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.dummy_inputs = {"images": torch.zeros(3, 8), "texts": torch.zeros(3, 8), "labels": torch.zeros(3)}

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return self.first(images) @ self.second(texts).t()


def test_rows_that_see_each_other_are_found() -> None:
    normed = ConvNet(ConvNetConfig(layers=2, hidden=8, classes=4, batch_norm=True))
    assert (
        describe(normed, batch={"images": torch.zeros(1, 3, 8, 8)}).against_division
        == "norm is a norm with batch statistics"
    )
    assert describe(Pairs).against_division.startswith("its output grows with the square of the number of rows")
    assert describe(Own).against_division == ""


class Looped(nn.Module):
    """Its blocks run twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return self.out(x)


def test_blocks_that_stages_cannot_be_cut_between_are_found() -> None:
    found = describe(Looped)
    assert found.against_stages == "blocks.0 runs more than once in a pass"
    assert "the model cannot be divided into pipeline stages: blocks.0 runs more than once in a pass" in found.notes
    assert describe(Own).against_stages == ""
