"""A model is understood by its structure: ours and Hugging Face's, without their names being known."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from model_sizes import TINY
from torch import nn
from torch.nn import functional as F

from meshwright import analysis
from meshwright.analysis.graph import HeadCount, ModelGraph, TpRegion, TpSplit, shard_intervals
from meshwright.models.registry import build_reference_model

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def small(name: str, **changes: object) -> nn.Module:
    return build_reference_model(
        {**TINY[name], "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, **changes}
    )


def hf_llama(tied: bool, attention: str) -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=tied, attn_implementation=attention
    )
    return transformers.LlamaForCausalLM(config)


def hf_gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_inner=48, attn_implementation=attention
    )
    return transformers.GPT2LMHeadModel(config)


def in_block(found: ModelGraph, index: int = 0) -> tuple[TpRegion, ...]:
    """The regions of a block with paths relative to it."""
    prefix = found.block(index) + "."

    def inside(path: str) -> str:
        return path.removeprefix(prefix)

    return tuple(
        TpRegion(
            inside(region.module), tuple(map(inside, region.columns)), tuple(map(inside, region.rows)), region.heads,
            region.kv_heads,
            tuple(HeadCount(inside(count.path), count.name, count.kind) for count in region.head_counts),
        )
        for region in found.regions
        if region.rows[0].startswith(prefix)
    )  # fmt: skip


def block_splits(found: ModelGraph, index: int = 0) -> dict[str, TpSplit]:
    prefix = found.block(index) + "."
    return {name.removeprefix(prefix): split for name, split in found.splits.items() if name.startswith(prefix)}


COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GROUPS = (HeadCount("self_attn", "num_key_value_groups", "groups"),)
GATED = TpRegion("mlp", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
LLAMA_BLOCK = {
    "self_attn.q_proj.weight": TpSplit(0, (), (4,)),
    **{f"self_attn.{name}_proj.weight": TpSplit(0, (), (2,)) for name in "kv"},
    "self_attn.o_proj.weight": TpSplit(1),
    "mlp.gate_proj.weight": TpSplit(0),
    "mlp.up_proj.weight": TpSplit(0),
    "mlp.down_proj.weight": TpSplit(1),
}
LLAMAS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: small("llama-tiny"),
    "ours, tied": lambda: small("llama-tiny", tied=True),
    "theirs": lambda: hf_llama(False, "sdpa"),
    "theirs, eager": lambda: hf_llama(False, "eager"),
    "theirs, tied": lambda: hf_llama(True, "sdpa"),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2, ours": lambda: small("gpt2-tiny"),
    "gpt2, sdpa": lambda: hf_gpt2("sdpa"),
    "gpt2, eager": lambda: hf_gpt2("eager"),
    "bert": lambda: small("bert-tiny"),
}


class Reading(NamedTuple):
    """A model and its analysis, with the tensors and the random state from before the analysis."""

    model: nn.Module
    found: ModelGraph
    tensors: dict[str, torch.Tensor]
    random_states: tuple[torch.Tensor, torch.Tensor]


@cache
def reading(name: str) -> Reading:
    """Analyses the model `name`. Tests of the same model share the result."""
    model = {**LLAMAS, **OTHERS}[name]().train()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    found = analysis.analyze_model(model)
    return Reading(model, found, tensors, (state, torch.get_rng_state()))


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.covering(3)
def test_llama_is_two_regions_entered_at_attention_and_feed_forward(name: str) -> None:
    found = reading(name).found
    assert (found.blocks, found.count, found.embedding, found.head) == (
        "model.layers",
        2,
        "model.embed_tokens",
        "lm_head",
    )
    assert found.tied == ("tied" in name)
    attention, gated = in_block(found)
    assert (attention.module, attention.columns, attention.rows) == ("self_attn", COLUMNS, ("self_attn.o_proj",))
    assert (attention.heads, attention.kv_heads, attention.head_counts) == (
        4,
        2,
        () if name.startswith("ours") else GROUPS,
    )
    assert gated == GATED
    assert block_splits(found, 0) == block_splits(found, 1) == LLAMA_BLOCK
    assert {n: s for n, s in found.splits.items() if ".layers." not in n} == {
        "model.embed_tokens.weight": TpSplit(0),
        "lm_head.weight": TpSplit(0),
    }
    assert found.divisible == {"heads": 4, "kv_heads": 2, "ffn": 48}
    assert found.vocabulary == 64
    assert not found.against_sequence
    norms = [
        f"model.layers.{i}.{norm}.weight" for i in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert sorted(found.replicated) == sorted([*norms, "model.norm.weight"])


@pytest.mark.parametrize("attention", ["ours", "sdpa", "eager"])
def test_gpt2_has_a_fused_projection_of_three_parts_and_a_tied_head(attention: str) -> None:
    found = reading(f"gpt2, {attention}").found
    assert (found.blocks, found.count, found.embedding, found.head) == (
        "transformer.h",
        2,
        "transformer.wte",
        "lm_head",
    )
    assert found.tied
    names = ("num_heads",) if attention == "ours" else ("num_heads", "embed_dim", "split_size")
    counts = tuple(HeadCount("attn", name, "share") for name in names)
    assert in_block(found) == (
        TpRegion("attn", ("attn.c_attn",), ("attn.c_proj",), 4, 4, counts),
        TpRegion("mlp", ("mlp.c_fc",), ("mlp.c_proj",)),
    )
    out, parts = (0 if attention == "ours" else 1), (32, 32, 32)  # Conv1D holds its weight the other way round
    assert block_splits(found, 1) == {
        "attn.c_attn.weight": TpSplit(out, parts, (4, 4, 4)),
        "attn.c_attn.bias": TpSplit(0, parts, (4, 4, 4)),
        "attn.c_proj.weight": TpSplit(1 - out),
        "mlp.c_fc.weight": TpSplit(out),
        "mlp.c_fc.bias": TpSplit(0),
        "mlp.c_proj.weight": TpSplit(1 - out),
    }
    assert found.splits["lm_head.weight"] == found.splits["transformer.wte.weight"] == TpSplit(0)
    assert found.divisible == {"heads": 4, "kv_heads": 4, "ffn": 48}


def test_bert_enters_its_feed_forward_at_the_column_layer() -> None:
    model, found, *_ = reading("bert")
    heads = (HeadCount("attention", "num_attention_heads", "share"),)
    columns = ("attention.query", "attention.key", "attention.value")
    assert in_block(found) == (
        TpRegion("attention", columns, ("attention.output",), 4, 4, heads),
        TpRegion("intermediate", ("intermediate",), ("output",)),
    )
    assert found.splits["decoder.bias"] == TpSplit(0)
    named = dict(analysis.params_by_layer(model, found))
    assert named["embedding"] == ["bert.embeddings.word_embeddings.weight"]
    assert named["head"] == ["decoder.bias"]
    assert named["front"][0] == "bert.embeddings.position_embeddings.weight"
    assert named["back"] == [
        "transform.dense.weight",
        "transform.dense.bias",
        "transform.norm.weight",
        "transform.norm.bias",
    ]


def test_bert_is_entered_below_its_residual_and_its_twice_named_bias_is_split() -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    found = analysis.analyze_model(model)
    assert [region.module for region in in_block(found)] == ["attention.self", "intermediate"]
    assert in_block(found)[0].rows == ("attention.output.dense",)
    assert found.splits["cls.predictions.bias"] == found.splits["cls.predictions.decoder.bias"] == TpSplit(0)
    assert dict(analysis.params_by_layer(model, found))["head"] == ["cls.predictions.bias"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name not in ("bert-tiny", "theirs", "opt")))
        for name in (*TINY, "theirs", "gpt2", "opt")
    ],
)
def test_every_parameter_stands_in_one_layer_in_forward_order(name: str) -> None:
    opt = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32
    )
    known = {"theirs": "theirs, tied", "gpt2": "gpt2, sdpa", "gpt2-tiny": "gpt2, ours", "bert-tiny": "bert"}
    if name in known:
        model, found, *_ = reading(known[name])
    else:
        model = transformers.OPTForCausalLM(opt) if name == "opt" else small(name)
        found = analysis.analyze_model(model)
    layers = analysis.params_by_layer(model, found)
    assert sorted(n for _, names in layers for n in names) == sorted(n for n, _ in model.named_parameters())
    order = ["embedding", "front", "block.0", "block.1", "back", "head"]
    assert [layer for layer, _ in layers] == [layer for layer in order if layer in dict(layers)]
    if name == "opt":  # registered before its layers, used behind them
        assert dict(layers)["back"] == ["model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias"]


def test_convolutions_are_cut_by_channels_and_a_network_without_blocks_is_replicated() -> None:
    conv = small("convnet-tiny")
    found = analysis.analyze_model(conv)
    assert (found.blocks, found.count, found.divisible) == ("blocks", 2, {"ffn": 32, "groups of norm1": 4})
    assert set(found.replicated) == {name for name, _ in conv.named_parameters()} - {
        f"blocks.{index}.{name}"
        for index in (0, 1)
        for name in ("conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight")
    }
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = analysis.analyze_model(plain)
    assert found.blocks is None
    assert analysis.params_by_layer(plain, found) == [
        ("block.0", ["0.weight", "0.bias"]),
        ("block.1", ["2.weight", "2.bias"]),
    ]


class Odd(nn.Module):
    """A block whose first pair norms all of its hidden features, and whose second pair is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.inner, self.narrow = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(self.inner(self.wide(x)))
        return x + self.down(F.silu(self.up(x)))


class OddModel(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(32, width)
        self.parts = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(width, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for part in self.parts:
            x = part(x)
        return self.out(x)


def test_a_norm_over_shared_features_keeps_its_region_whole_and_the_rest_is_sharded() -> None:
    found = analysis.analyze_model(OddModel(Odd))
    assert in_block(found, 2) == (TpRegion("up", ("up",), ("down",)),)
    assert block_splits(found, 2) == {"up.weight": TpSplit(0), "up.bias": TpSplit(0), "down.weight": TpSplit(1)}
    assert found.against_sequence == "parts.0.wide.weight is not sharded"
    assert any(
        line.startswith("wide are not sharded: ") and "all features for layer_norm" in line for line in found.findings
    )


def test_regions_of_a_model_that_runs_by_its_shapes_but_not_with_numbers_stay_whole() -> None:
    model = hf_llama(False, "sdpa")
    forward = model.model.forward

    def by_shapes_alone(input_ids: torch.Tensor, **rest: object) -> object:
        if input_ids.device.type != "meta":
            raise ValueError("no numbers here")
        return forward(input_ids, **rest)

    model.model.forward = by_shapes_alone
    found = analysis.analyze_model(model)
    assert found.regions == () and found.count == 2
    assert any("the model does not run with real values (no numbers here)" in line for line in found.findings)


def test_a_plan_that_the_model_carries_is_used_where_the_model_does_not_run() -> None:
    model, wanted = LLAMAS["theirs, eager"](), reading("theirs, eager").found
    model.model.forward = None  # cannot run
    found = analysis.analyze_model(model)
    assert any("plan that the model carries" in line for line in found.findings)
    assert [(one.module, one.columns, one.rows) for one in found.regions] == [
        (one.module, one.columns, one.rows) for one in wanted.regions
    ]
    vocabulary = {"model.embed_tokens.weight", "lm_head.weight"}
    assert found.splits == {name: split for name, split in wanted.splits.items() if name not in vocabulary}
    assert "lm_head is not sharded: it was not seen to run" in found.findings
    assert found.divisible == wanted.divisible
    assert analysis.params_by_layer(model, found) == analysis.params_by_layer(model, wanted)


def test_reading_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model, _, before, random_states = reading("gpt2, sdpa")
    assert torch.equal(*random_states)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(
        module.training and not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_intervals_of_all_ranks_cover_each_part_once(ranks: int) -> None:
    for size in (1, 5, 8, (8, 4, 4), (3, 1)):
        held = sorted(
            i for rank in range(ranks) for start, stop in shard_intervals(size, rank, ranks) for i in range(start, stop)
        )
        assert held == list(range(size if isinstance(size, int) else sum(size)))


class Grouped(nn.Module):
    """Attention whose fused projection is cut by heads only after a view, by a count of its own or by one written into
    its forward."""

    def __init__(self, own_count: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        if own_count:
            self.num_heads = 4
        self.feed, self.back = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = getattr(self, "num_heads", 4)
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split(heads, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.back(self.feed(x).relu())


@pytest.mark.parametrize("own_count", [False, True])
def test_a_region_whose_shards_do_not_sum_up_stays_whole(
    own_count: bool,
) -> None:
    model = OddModel(lambda: Grouped(own_count), width=32)
    found = analysis.analyze_model(model)
    if own_count:
        assert [region.columns for region in in_block(found)] == [("qkv",), ("feed",)]
        assert found.splits["parts.0.qkv.weight"] == TpSplit(0, (32, 32, 32), (4, 4, 4))
        return
    assert [region.columns for region in in_block(found)] == [("feed",)]
    assert any(line.startswith("qkv are not sharded") for line in found.findings)
    assert found.against_sequence == "parts.0.qkv.weight is not sharded"


class Turned(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Scaled(nn.Module):
    """Heads scaled by 1 + weight; layers with a forward of their own."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.up, self.scale, self.down = (
            Turned(8, 16, bias=False),
            nn.Parameter(torch.zeros(4)),
            Turned(16, 8, bias=False),
        )
        self.called = called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.up(x) if self.called else x @ self.up.weight.T).unflatten(-1, (-1, 4))
        return x + self.down((y * (1.0 + self.scale.float())).flatten(2))


def test_a_parameter_that_reaches_shares_by_way_of_another_tensor_is_partial() -> None:
    found = analysis.analyze_model(OddModel(lambda: Scaled(called=True)))
    assert in_block(found) == (TpRegion("up", ("up",), ("down",)),)
    assert block_splits(found) == {"up.weight": TpSplit(0), "down.weight": TpSplit(1)}
    assert found.partial == tuple(f"parts.{index}.scale" for index in range(3))


def test_a_layer_whose_weight_is_read_without_a_call_stays_whole() -> None:
    found = analysis.analyze_model(OddModel(lambda: Scaled(called=False)))
    assert not found.regions
    assert "up are not sharded: the weight of up is read outside of its forward" in found.findings


class Asking(OddModel):
    """Asks questions of its token ids that are answered by yes or no."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not (31 in ids and torch.equal(ids, ids + 1))
        return super().forward(ids)


def test_questions_about_values_are_answered_where_there_are_none() -> None:
    assert [region.rows for region in analysis.analyze_model(Asking(lambda: Scaled(called=True))).regions] == [
        (f"parts.{number}.down",) for number in range(3)
    ]
