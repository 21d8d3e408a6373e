"""Models that no formula knows: a step of them allocates what the estimate of what was found in them says, counted by
torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peak_memory import of_second_step
from torch import nn

from meshwright.analysis.profile.model_spec import describe
from meshwright.models.registry import build_reference_model
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload
from meshwright.train.trainer import Trainer, parallelize

BATCH, SEQUENCE, VOCABULARY = 8, 128, 1000
PLAN = "dp1.mb8"
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IMAGES = {"num_channels": 3, "image_size": 32, "patch_size": 4, **SMALL}


class Encoder(nn.Module):
    """Somebody's own model of torch's parts: learned positions, fused attention, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 128), nn.Embedding(SEQUENCE, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 352, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hugging_face(kind: str, **more: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SMALL, use_cache=False, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def images() -> nn.Module:
    return transformers.AutoModelForImageClassification.from_config(transformers.AutoConfig.for_model("vit", **IMAGES))


def convolution() -> nn.Module:
    model = build_reference_model({"kind": "convnet", "layers": 3, "hidden": 32, "classes": 10})
    model.dummy_inputs = {"images": torch.zeros(1, 3, 32, 32)}
    return model


def two_stacks() -> nn.Module:
    sizes = {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 352,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "dropout_rate": 0.0,
    }
    config = transformers.AutoConfig.for_model("t5", **sizes, use_cache=False, decoder_start_token_id=0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "phi": lambda: hugging_face("phi", pad_token_id=0),
    "olmo": lambda: hugging_face("olmo", pad_token_id=0),
    "starcoder2": lambda: hugging_face(
        "starcoder2", num_key_value_heads=2, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0
    ),
    "granite": lambda: hugging_face("granite"),
    "encoder": Encoder,
    "vit": images,
    "convnet": convolution,
    "t5": two_stacks,
}


def batch_of(name: str) -> dict[str, torch.Tensor]:
    if name in ("vit", "convnet"):
        what = "pixel_values" if name == "vit" else "images"
        return {what: torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(2, (BATCH,))}
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}
    return {"tokens" if name == "encoder" else "input_ids": ids, "labels": ids}


def peak(name: str, precision: str, plan: str = PLAN) -> float:
    def made() -> tuple[Trainer, dict[str, torch.Tensor]]:
        trainer = parallelize(
            MODELS[name](), lambda params: torch.optim.AdamW(params, fused=True), plan, precision=precision
        )
        return trainer, batch_of(name)

    return of_second_step(made)[0]


CASES = [
    (name, precision) for name in MODELS for precision in ("fp32", "bf16") if (name, precision) != ("convnet", "bf16")
]
"""A convolution in bfloat16 on a CPU makes copies of its own (oneDNN), 9 % of this small model's peak: no part of the
model."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*case, marks=[pytest.mark.soak] * (case != ("olmo", "fp32"))) for case in CASES],
)
def test_a_step_allocates_what_the_model_was_found_to_keep(name: str, precision: str) -> None:
    sequence = 1 if name in ("vit", "convnet") else SEQUENCE
    found = describe(MODELS[name], sequence, precision=precision)
    workload = Workload(batch=BATCH, sequence=sequence, precision=precision)
    memory = estimate(Job(model=found, cluster=read_cluster("1x1:cpu"), workload=workload), parse_plan(PLAN)).memory
    assert memory.total == pytest.approx(peak(name, precision), rel=0.05)


def job_of_two_stacks(model: ModelSpec) -> Job:
    workload = Workload(batch=BATCH, sequence=SEQUENCE, precision="fp32")
    return Job(model=model, cluster=read_cluster("1x1:cpu"), workload=workload)


def test_both_stacks_of_an_encoder_and_decoder_are_blocks_and_recompute() -> None:
    found = describe(two_stacks, SEQUENCE, precision="fp32")
    assert found.blocks == 4
    assert [(layer.name, layer.repeat) for layer in found.layers if layer.name in ("block", "between", "back")][2:] == [
        ("between", 1),
        ("block", 1),
        ("block", 1),
        ("back", 1),
    ]
    kept, again = (estimate(job_of_two_stacks(found), parse_plan(each)).memory for each in (PLAN, f"{PLAN}.rc-full"))
    assert again.activations < 0.7 * kept.activations


@pytest.mark.soak
def test_a_step_of_both_stacks_that_recompute_allocates_what_the_estimate_says() -> None:
    plan = f"{PLAN}.rc-full"
    again = estimate(job_of_two_stacks(describe(two_stacks, SEQUENCE, precision="fp32")), parse_plan(plan)).memory
    assert again.total == pytest.approx(peak("t5", "fp32", plan), rel=0.05)
