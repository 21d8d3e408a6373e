"""Which lists of modules the stages of a pipeline cut: those that hand on a hidden state in one form; experts are
looked for in all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import SHAPE_CHANGED_REASON, analyze_model
from meshwright.analysis.block_lists import params_by_layer
from meshwright.analysis.run_conditions import group_identical_blocks

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from model_families import build_own

transformers = pytest.importorskip("transformers")


class Shortening(nn.Module):
    def __init__(self, given: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(given, 64, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.conv(x))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Hearing(nn.Module):
    """Convolutions that shorten a wave, far wider than the encoder behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Shortening(1), Shortening(64), Shortening(64)])
        self.project, self.layers, self.head = (
            nn.Linear(64, 8),
            nn.ModuleList(Feed() for _ in range(4)),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = conv(x)
        x = self.project(x.transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_blocks_are_the_shape_preserving_modules_however_wide_others_are() -> None:
    model = Hearing()
    found = analyze_model(model, example={"x": torch.zeros(2, 1, 64)})
    assert found.stacks == (("layers", 4),) and (found.blocks, found.count) == ("layers", 4)
    assert f"convs cannot be cut into pipeline stages: {SHAPE_CHANGED_REASON}" in found.findings
    placed = dict(params_by_layer(model, found))
    assert {"convs.0.conv.weight", "project.weight"} <= set(placed["front"]) and placed["back"] == [
        "head.weight",
        "head.bias",
    ]


def test_consecutive_parts_are_all_stacks_though_each_changes_the_shape_first() -> None:
    assert analyze_model(build_own("resnet")).stacks == (("layer1", 2), ("layer2", 2))


def test_text_experts_are_found_next_to_an_unused_image_model() -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
    }
    text = {
        **sizes,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "pad_token_id": 0,
    }
    image = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 256,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config={**image, "deepstack_visual_indexes": [0]})
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    found = analyze_model(transformers.Qwen3VLMoeForConditionalGeneration(config))
    assert [experts.path for experts in found.experts] == [
        f"model.language_model.layers.{number}.mlp.experts" for number in range(2)
    ]
    assert found.blocks == "model.language_model.layers"


class Numbered(nn.Module):
    """A block that stores its index, and another number."""

    def __init__(self, index: int, heads: int) -> None:
        super().__init__()
        self.index, self.heads, self.linear = index, heads, nn.Linear(4, 4)


def test_a_block_whose_index_equals_its_number_of_heads_is_of_the_same_kind() -> None:
    assert group_identical_blocks([Numbered(index, 3) for index in range(6)]) == [0] * 6


def test_a_number_that_equals_the_index_of_some_blocks_is_compared() -> None:
    alternating = [Numbered(index, index % 2) for index in range(6)]
    assert group_identical_blocks(alternating) == [0, 1, 0, 1, 0, 1]


def test_a_number_that_only_one_block_has_is_compared_even_if_it_equals_its_index() -> None:
    blocks = [Numbered(index, 3) for index in range(6)]
    blocks[4].window = 4  # type: ignore[assignment]
    assert group_identical_blocks(blocks) == [0, 0, 0, 0, 4, 0]


def test_blocks_of_a_second_list_store_the_index_in_their_own_list() -> None:
    two = [Numbered(index, 3) for index in (0, 1, 2, 0, 1, 2)]
    assert group_identical_blocks(two, [0, 1, 2, 0, 1, 2]) == [0] * 6
