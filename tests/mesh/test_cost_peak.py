"""The estimate's memory is what a step allocates: peaks of real steps in one process, counted by torch's own
profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peak_memory import of_second_step

from meshwright.models.registry import build_reference_model
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload
from meshwright.train.trainer import Trainer, parallelize

SMALL = {"layers": 2, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 1000, "seq": 128}
LEARNED = {"mlp": "gelu", "norm": "ln", "linear_bias": True, "pos": "learned", "tied_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", **SMALL},
    "gpt2": {"kind": "gpt2", **SMALL, **LEARNED},
    "bert": {"kind": "bert", **SMALL, **LEARNED, "embedding_norm": True, "types": 2},
}
BATCH = 8


def peak(sizes: dict[str, Any], plan: str, precision: str) -> tuple[float, dict[str, int]]:
    def made() -> tuple[Trainer, dict[str, torch.Tensor]]:
        trainer = parallelize(
            build_reference_model(sizes),
            lambda params: torch.optim.AdamW(params, fused=True),
            plan,
            precision=precision,
        )
        ids = torch.randint(sizes["vocab"], (BATCH, sizes["seq"]))
        return trainer, {"input_ids": ids, "labels": ids}

    return of_second_step(made)


@pytest.mark.parametrize("model", [pytest.param(name, marks=[pytest.mark.soak] * (name != "gpt2")) for name in MODELS])
@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("dp1.mb4.rc-full", "fp32"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("dp1.mb4", "fp32"), ("dp1.mb8", "bf16"), ("dp1.mb4.rc-full", "bf16"))
        ),
    ],
)
def test_a_step_allocates_what_the_estimate_says(model: str, plan: str, precision: str) -> None:
    sizes = MODELS[model]
    workload = Workload(batch=BATCH, sequence=sizes["seq"], precision=precision)
    job = Job(model=model_spec(model, ArchitectureSizes(**sizes)), cluster=read_cluster("1x1:cpu"), workload=workload)
    memory = estimate(job, parse_plan(plan)).memory
    measured, held = peak(sizes, plan, precision)
    assert {kind: getattr(memory, kind) for kind in held} == held
    assert memory.total == pytest.approx(measured, rel=0.03)
