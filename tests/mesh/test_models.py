"""The reference models are ordinary, exact and the same whatever the plan."""

import math
import sys

import pytest
import torch
from model_sizes import TINY
from torch.nn import functional as F
from transformers import AutoConfig

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError
from meshwright.models.registry import build_from_config, build_reference_model
from meshwright.planner.inputs.architecture_sizes import HF_FAMILIES, sizes_from_catalog, sizes_from_hf_config
from meshwright.planner.inputs.model_parser import read_model
from meshwright.spec.huggingface_config import TRANSFORMERS_TYPES, huggingface_config, huggingface_type
from meshwright.spec.job import ModelSource
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.verify import VerifyRequest, build_small_model

torch.set_num_threads(1)
SMALL = {name: {**sizes, "layers": 2, "hidden": 32} for name, sizes in TINY.items()}


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name.startswith("convnet"):
        return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
    tokens = torch.randint(64, (4, 16), generator=generator)
    labels = tokens.clone()
    labels[0, 9:] = -100
    return tokens, labels


@pytest.mark.parametrize("name", TINY)
def test_every_model_starts_near_chance_and_overfits_one_batch(name: str) -> None:
    torch.manual_seed(1)
    model = build_reference_model(SMALL[name])
    inputs, labels = batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(40):
        loss = model(inputs, labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    chance = math.log(10 if name.startswith("convnet") else 512)
    assert abs(losses[0] - chance) < (1.5 if name.startswith("convnet") else 0.1)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", TINY)
def test_the_same_seed_gives_the_same_model_and_another_seed_another(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_reference_model(SMALL[name]).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize("name", [name for name in TINY if name != "convnet-tiny"])
def test_the_loss_is_the_mean_over_valid_labels_with_the_shift_of_a_causal_model(name: str) -> None:
    torch.manual_seed(1)
    model = build_reference_model(SMALL[name])
    tokens, labels = batch(name)
    result = model(tokens, labels)
    logits, wanted = (result.logits[:, :-1], labels[:, 1:]) if model.shift_labels else (result.logits, labels)
    valid = wanted != -100
    expected = F.cross_entropy(logits[valid], wanted[valid])
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(tokens).loss is None
    assert model.shift_labels == (name != "bert-tiny")


@pytest.mark.parametrize(("name", "causal"), [("llama-tiny", True), ("gpt2-tiny", True), ("bert-tiny", False)])
def test_a_decoder_does_not_see_the_future_and_an_encoder_does(name: str, causal: bool) -> None:
    torch.manual_seed(1)
    model = build_reference_model(SMALL[name])
    tokens, _ = batch(name)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 64
    first, second = model(tokens).logits[:, :-1], model(changed).logits[:, :-1]
    assert torch.equal(first, second) == causal


@pytest.mark.parametrize("tied", [False, True])
def test_llama_computes_what_hugging_face_computes(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {**SMALL["llama-tiny"], "tied": tied}
    model = build_reference_model(sizes).double()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            intermediate_size=384, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    state = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    assert set(state) | {"lm_head.weight"} == set(theirs.state_dict())
    theirs.double().load_state_dict(model.state_dict())
    tokens, labels = batch("llama")
    ours, other = model(tokens, labels), theirs(tokens, labels=labels)
    # Hugging Face keeps its rotary angles and its norms in float32
    assert torch.allclose(ours.logits, other.logits, atol=1e-5)
    assert ours.loss.item() == pytest.approx(other.loss.item(), rel=1e-5)


def test_gpt2_and_bert_tie_their_head_and_count_one_weight() -> None:
    for name in ("gpt2-tiny", "bert-tiny"):
        tied, untied = build_reference_model(SMALL[name]), build_reference_model({**SMALL[name], "tied": False})
        difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        assert difference == 512 * 32


def test_the_catalogs_published_sizes_give_the_published_parameter_counts() -> None:
    known = {
        ("gpt2-small", 124_439_808): {
            "layers": 12,
            "hidden": 768,
            "heads": 12,
            "ffn": 3072,
            "vocab": 50257,
            "seq": 1024,
            "pos": "learned",
        },
        ("llama1-7b", 6_738_415_616): {
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "ffn": 11008,
            "vocab": 32000,
            "seq": 2048,
        },
        ("qwen2.5-0.5b", 494_032_768): {
            "layers": 24,
            "hidden": 896,
            "heads": 14,
            "kv_heads": 2,
            "ffn": 4864,
            "vocab": 151936,
            "seq": 32768,
            "tied_embeddings": "1",
            "qkv_bias": "1",
        },
    }
    for (name, published), sizes in known.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in build_reference_model(sizes).parameters()) == published, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "hidden (128) must be heads (7) times head_dim (18)"),
        ({"kv_heads": 3}, "heads (8) must be a multiple of kv_heads (3)"),
        ({"vocab": None}, "model needs 'vocab'"),
        ({"layers": 0}, "layers (0) must be at least 1"),
        ({"experts": 8}, "experts (8): the reference model 'llama' has no experts, 'decoder' has"),
        ({"kind": "lama"}, "did you mean 'llama'"),
    ],
)
def test_sizes_that_no_model_can_have_are_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_reference_model({**TINY["llama-tiny"], **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_model_names_its_neighbour() -> None:
    with pytest.raises(InputError, match="did you mean 'llama'"):
        build_reference_model({"kind": "lama"})


def test_every_catalog_model_is_built_with_its_parameters() -> None:
    refused = []
    for name, row in catalog.models().items():
        sizes = sizes_from_catalog(row)
        if sizes.kind == "convnet" or huggingface_type(sizes.model_dump()) in TRANSFORMERS_TYPES:
            continue
        counts = []
        try:
            for layers in (1, 2):
                with torch.device("meta"):
                    model = build_reference_model({**row, "layers": str(layers)})
                counts.append(sum(parameter.numel() for parameter in model.parameters()))
        except InputError:
            refused.append(name)
            continue
        total = counts[0] + (counts[1] - counts[0]) * (int(row["layers"]) - 1)
        # The formula of an encoder leaves out the head, which adds 0.05 % at most.
        assert total == pytest.approx(int(row.get("formula_params", total)), rel=5e-4 if row["kind"] == "bert" else 0)
    assert refused == ["gpt3-1.3b", "gpt3-13b"]  # as published: 24 heads of 2,048 and 40 of 5,140 features


UNCOUNTED = {
    "deepseek-v3": -14_848,  # biases of routers are buffers
    "gpt-oss-120b": 39_923_712,  # biases of experts, sinks of attention
    "nemotron4-15b": 399_360,  # biases of norms
    "nemotron4-340b": 3_557_376,
}
"""Parameters of the modules of transformers that the planner's formulas do not count."""


def test_transformers_builds_the_catalog_models_without_a_reference_model_with_their_parameters() -> None:
    built = {}
    for name, row in catalog.models().items():
        sizes = sizes_from_catalog(row).model_dump()
        if huggingface_type(sizes) not in TRANSFORMERS_TYPES:
            continue
        with torch.device("meta"):
            model = build_reference_model(sizes)
        built[name] = type(model).__name__
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count - UNCOUNTED.get(name, 0) == read_model(name).parameters, name
        assert read_model(name).against_training == ""
        config = huggingface_config(sizes)
        if config["model_type"] in HF_FAMILIES:
            back = sizes_from_hf_config(config, name)
            kept = ("layers", "hidden", "heads", "kv_heads", "ffn", "mla")
            assert {key: back.model_dump()[key] for key in kept} == {key: sizes[key] for key in kept}
    assert len(built) == 23 and len(set(built.values())) == 7


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"type gpt_neox needs transformers: pip install 'meshwright\[huggingface\]'"):
        build_reference_model(sizes_from_catalog(catalog.models()["pythia-70m"]).model_dump())


def test_a_bloom_model_with_another_feed_forward_is_refused() -> None:
    sizes = sizes_from_catalog(catalog.models()["bloom-560m"]).model_dump()
    with pytest.raises(InputError, match=r"ffn \(3072\) of a BLOOM model must be 4 times hidden \(1024\)"):
        build_reference_model({**sizes, "ffn": 3072})


@pytest.mark.parametrize("name", ["llama2-7b", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_an_exported_model_has_the_parameters_of_its_class_in_transformers(name: str) -> None:
    sizes = {**sizes_from_catalog(catalog.models()[name]).model_dump(), "layers": 1}
    with torch.device("meta"):
        ours = build_reference_model(sizes)
        theirs = build_from_config(AutoConfig.for_model(**huggingface_config(sizes)))
    shapes = [{name: tuple(each.shape) for name, each in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_the_small_model_of_verify_has_the_heads_of_latent_attention(name: str) -> None:
    """The rotary part of a head had its full size, so the small model could not run."""
    source = ModelSource(name=name, sizes=sizes_from_catalog(catalog.models()[name]).model_dump(exclude_none=True))
    request = VerifyRequest(model=source, plan=parse_plan("tp2"), optimizer=OptimizerConfig(), precisions=())
    model = build_small_model(request)
    assert model(torch.randint(8, (2, 8))).logits.shape[:2] == (2, 8)
