"""Bytes that real ranks hold for weights, gradients and optimizer are those of the estimate, exactly.

The vocabulary does not divide by tp: the estimate is that of the first tensor rank, the fullest; the last one holds
some rows less.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.models.registry import build_reference_model
from meshwright.train.trainer import parallelize

SMALL = {"layers": 4, "hidden": 48, "heads": 4, "ffn": 132, "vocab": 101, "seq": 16}
LEARNED = {"mlp": "gelu", "norm": "ln", "linear_bias": True, "pos": "learned", "tied_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", **SMALL},
    "llama-tied": {"kind": "llama", "tied_embeddings": True, **SMALL},
    "gpt2": {"kind": "gpt2", **SMALL, **LEARNED},
    "bert": {"kind": "bert", **SMALL, **LEARNED, "embedding_norm": True, "types": 2},
}
CASES = [
    ("llama", "dp2.z1", "bf16"), ("llama", "dp2.tp2.sp.z3", "fp32"), ("llama", "dp2.pp2.z2.interleaved2", "bf16"),
    ("llama-tied", "tp2.pp2", "fp32"), ("llama-tied", "dp2.pp2.z3", "bf16"), ("gpt2", "dp2.tp2.z3", "bf16"),
    ("gpt2", "pp4", "fp32"), ("gpt2", "dp2x2.z2", "fp32"), ("bert", "dp2.pp2.z1", "bf16"), ("bert", "tp4", "fp32"),
    ("bert", "dp4.z3", "bf16"), ("llama", "dp2.cp2.z3", "bf16"), ("gpt2", "cp2.z1", "fp32"),
]  # fmt: skip
BATCH = 4


def held(sizes: dict[str, Any], plan: str, precision: str, bucket: int) -> dict[str, int]:
    """On every rank: bytes after one step, with buckets small enough that there are several."""
    from meshwright.spec.plan import parse_plan

    torch.manual_seed(0)
    trainer = parallelize(
        build_reference_model(sizes), torch.optim.AdamW, parse_plan(plan).but(bucket=bucket), precision=precision
    )
    ids = torch.randint(sizes["vocab"], (BATCH, sizes["seq"]), generator=torch.Generator().manual_seed(1))
    trainer.step({"input_ids": ids, "labels": ids})
    return trainer.bytes()


@pytest.mark.parametrize("bucket", [30_000, pytest.param(25 * 2**20, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("model", "plan", "precision"), CASES)
@pytest.mark.covering(2)
def test_ranks_hold_the_bytes_of_the_estimate(ranks: Any, model: str, plan: str, precision: str, bucket: int) -> None:
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.plan import parse_plan
    from meshwright.spec.workload import Workload

    chosen = parse_plan(plan).but(bucket=bucket)
    workload = Workload(batch=BATCH, sequence=SMALL["seq"], precision=precision)
    job = Job(
        model=model_spec(model, ArchitectureSizes(**MODELS[model])),
        cluster=read_cluster(f"1x{chosen.world}:cpu"),
        workload=workload,
    )
    stages = estimate(job, chosen).per_stage
    for rank, found in enumerate(ranks.run(chosen.world, held, MODELS[model], plan, precision, bucket)):
        memory = stages[rank * chosen.pp // chosen.world]
        expected = {kind: getattr(memory, kind) for kind in found}
        if rank % chosen.tp == 0:
            assert found == expected
        assert all(found[kind] <= expected[kind] for kind in found)
