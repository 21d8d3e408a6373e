"""Of what waits by shares, real ranks hold on the device and elsewhere the bytes of the estimate, exactly: one function
cuts the runs of units and counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_offload_device_memory import beyond

from meshwright.models.registry import build_reference_model
from meshwright.runtime.build import parallelize as training
from meshwright.runtime.offload.swapper import make_state_swapper
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

SMALL = {"kind": "llama", "hidden": 48, "heads": 4, "ffn": 132, "vocab": 101, "seq": 16}
MODELS: dict[str, dict[str, Any]] = {
    "2": {**SMALL, "layers": 2},
    "8": {**SMALL, "layers": 8},
    "8-tied": {**SMALL, "layers": 8, "tied_embeddings": True},
    "mixtral": {**SMALL, "layers": 2, "experts": 4, "top_k": 2},
}
BATCH = 12
BUCKET = 60_000
"""Several units below ZeRO 3 as well."""


def held(model: str, plan: str, precision: str, folder: str, apart: bool) -> dict[str, int]:
    """On every rank: bytes after one step; `apart`: beside a device that has memory of its own."""
    torch.manual_seed(0)
    training.make_state_swapper = beyond if apart else make_state_swapper  # type: ignore[attr-defined]
    try:
        trainer = parallelize(
            build_reference_model(MODELS[model]),
            torch.optim.AdamW,
            parse_plan(plan).but(bucket=BUCKET),
            precision=precision,
            offload_to=folder,
        )
    finally:
        training.make_state_swapper = make_state_swapper  # type: ignore[attr-defined]
    ids = torch.randint(SMALL["vocab"], (BATCH, SMALL["seq"]), generator=torch.Generator().manual_seed(1))
    trainer.step({"input_ids": ids, "labels": ids})
    found = trainer.bytes()
    trainer.close()
    return found


def expected(model: str, plan: str, precision: str, apart: bool) -> tuple[list[Any], float]:
    """The estimate of each stage, and the most that waits elsewhere of a rank."""
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.workload import Workload

    chosen = parse_plan(plan).but(bucket=BUCKET)
    workload = Workload(batch=BATCH, sequence=SMALL["seq"], precision=precision)
    cluster = read_cluster(f"1x{chosen.world}:{'a100-80gb' if apart else 'cpu'}")
    if apart:
        groups = tuple(group.but(storage_bandwidth=1e9) for group in cluster.groups)
        cluster = cluster.but(groups=groups)
    said = estimate(
        Job(model=model_spec(model, ArchitectureSizes(**MODELS[model])), cluster=cluster, workload=workload), chosen
    )
    return list(said.per_stage), said.offloaded


SHARES = (
    ".off-parameters-disk50",
    ".off-optimizer-disk60.off-parameters-disk50",
    ".off-optimizer-disk30.off-parameters-disk70",
)
"""Of states and of weights; below ZeRO 3 only states wait."""

FILES = [
    (model, f"{ranks}{way}", precision)
    for model, precision, ranks in (
        ("2", "fp32", "dp1"), ("8", "bf16", "dp1"), ("2", "bf16", "dp2"), ("8", "fp32", "dp3"),
        ("2", "fp32", "pp2.mb4"), ("8-tied", "bf16", "pp2.mb4"),
    )
    for way in (".off-optimizer-disk60", *(f".z3{both}" for both in SHARES))
]  # fmt: skip
OTHERS = [
    ("2", "dp2.z1.off-optimizer-disk1", "bf16"), ("8", "dp2.z2.off-optimizer-disk99", "fp32"),
    ("8-tied", "dp3.z1.off-optimizer-disk40", "bf16"), ("2", "dp2.z1.zw3-1.off-optimizer-disk60", "fp32"),
    ("8", "dp2.z3.zw3-1.off-optimizer-disk60.off-parameters-disk50", "bf16"),
    ("2", "dp3.z3.zw3-1-7.off-optimizer-disk30.off-parameters-disk70", "bf16"),
    ("8", "tp2.z3.off-optimizer-disk60.off-parameters-disk50", "fp32"),
    ("8", "dp2.pp2.z3.mb3.off-optimizer-disk70.off-parameters-disk20", "bf16"),
    ("2", "dp2.z3.off-optimizer-disk5.off-parameters-disk95", "fp64"),
]  # fmt: skip
BEYOND = [
    (model, f"{ranks}{way}", precision)
    for model, precision, ranks in (("2", "bf16", "dp2"), ("8", "bf16", "dp1"), ("8-tied", "bf16", "pp2.mb4"),
        ("2", "fp32", "dp3"))
    for way in (
        ".z1.off-optimizer60", ".z2.off-optimizer60.off-gradients", ".z3.off-optimizer70.off-parameters50",
        ".z3.off-optimizer-disk60.off-gradients.off-parameters50",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "plan", "precision", "apart"),
    [*((*case, False) for case in (*FILES, *OTHERS)), *((*case, True) for case in BEYOND)],
)
@pytest.mark.covering(2)
def test_what_waits_by_shares_and_what_stays_are_the_bytes_of_the_estimate(
    ranks: Any, tmp_path: Any, model: str, plan: str, precision: str, apart: bool
) -> None:
    chosen = parse_plan(plan)
    stages, away = expected(model, plan, precision, apart)
    fullest = (
        max(range(len(chosen.shard_weights)), key=lambda shard: chosen.shard_weights[shard])
        if chosen.shard_weights
        else -1
    )
    found = ranks.run(chosen.world, held, model, plan, precision, str(tmp_path), apart)
    for rank, kinds in enumerate(found):
        memory = stages[rank * chosen.pp // chosen.world]
        said = {kind: getattr(memory, kind) for kind in ("parameters", "gradients", "optimizer")}
        if fullest in (-1, rank) and rank % chosen.tp == 0:
            assert {kind: kinds[kind] for kind in said} == said
        assert all(kinds[kind] <= said[kind] for kind in said)
    assert max(kinds["offloaded"] for kinds in found) == away
