"""With what a host and a device have, one device trains a model at least as large as DeepSpeed's own formulas allow."""

from __future__ import annotations

import pytest

from meshwright.core.errors import NothingFits
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.inputs.cluster_syntax import parse_cluster
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload

GIB = 2.0**30


def job_of(layers: int, device: str, host: float) -> Job:
    model = model_spec(
        "llama", ArchitectureSizes(kind="llama", layers=layers, hidden=4096, heads=32, ffn=11008, vocab=32000, seq=1024)
    )
    on = parse_cluster(f"1x1:{device}")
    return Job(
        model=model,
        cluster=on.but(groups=(on.groups[0].but(host_memory=host),)),
        workload=Workload(batch=1, sequence=1024, precision="bf16"),
    )


def allowed(device_memory: float, host: float, largest: int) -> float:
    """Parameters by `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` of DeepSpeed
    (deepspeed.readthedocs.io/en/latest/memory.html)
    for one device: 2 bytes a parameter there and 16 x 1.5 on the host, or 4 of the `largest` layer and 18 x 1.5. They
    count no activations."""
    by_states = min(device_memory / 2, host / 24)
    return max(by_states, host / 27 if 4 * largest < device_memory else 0.0)


@pytest.mark.parametrize(
    ("device", "host"),
    [("a100-80gb", 256), ("a100-80gb", 1024), ("rtx-4090", 128), ("rtx-4090", 256), ("rtx-4090", 1024)],
)
@pytest.mark.covering(2)
def test_the_largest_model_is_no_smaller_than_what_zero_offload_allows(device: str, host: float) -> None:
    least = job_of(1, device, host * GIB)
    block, embedding = job_of(2, device, 0.0).model.parameters - least.model.parameters, 32000 * 4096
    wanted = allowed(least.cluster.memory, host * GIB, max(block, embedding))
    layers = int((wanted - least.model.parameters) // block) + 2
    job = job_of(layers, device, host * GIB)
    assert job.model.parameters >= wanted
    try:
        assert search_plans(job, 1).chosen.estimate.memory.reserved <= job.cluster.memory
    except NothingFits as error:
        pytest.fail(f"{job.model.parameters / 1e9:.1f} B: {error}")


@pytest.mark.parametrize("zero", [2, 3])
def test_of_gradients_that_wait_on_the_host_each_rank_sends_its_own_shard(zero: int) -> None:
    """Eight ranks send an eighth each, and their processors add as much of it as one rank's would, for eight times as
    many devices."""
    one = job_of(32, "h100", 2048 * GIB)
    job = one.but(cluster=parse_cluster("1x8:h100"), workload=one.workload.but(batch=8))

    def down(job: Job, plan: str) -> float:
        kept, sent = (
            estimate(job, parse_plan(f"{plan}.rc-full.off-optimizer{away}")).time for away in ("", ".off-gradients")
        )
        return sent.offload - kept.offload

    assert 0 < down(job, f"dp8.z{zero}") <= down(one, f"dp1.z{zero}")
