"""What crosses between nodes, priced: tiers, compressed gradients, replicas that meet rarely."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost.collectives import Fabric, group
from meshwright.cost.step import estimate
from meshwright.intake.clusters import read_cluster
from meshwright.intake.models import read_model
from meshwright.spec.cluster import Link
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload

NEAR, FAR = Link(name="in", bandwidth=10e9, latency=1e-6), Link(name="out", bandwidth=12.5e6, latency=1e-4)


def priced(plan: str, **asked: Any) -> Estimate:
    cluster = read_cluster("2x2:cpu@1Gb")
    job = Job(model=read_model("llama-tiny"), cluster=cluster, workload=Workload(batch=16, sequence=64, **asked))
    return estimate(job, parse_plan(plan))


def test_what_crosses_nodes_crosses_once_for_each_of_them() -> None:
    tiers, flat = group(Fabric(2, NEAR, FAR, handed=True), 4, 1), group(Fabric(1, NEAR, FAR, handed=True), 4, 1)
    assert float(flat.gather(8e6) / tiers.gather(8e6)) == pytest.approx(3.0, rel=0.1)
    assert float(flat.reduce(8e6) / tiers.reduce(8e6)) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("plan", ["dp4", "dp4.z1"])
def test_fewer_bytes_take_less_time_and_what_is_kept_back_takes_memory(plan: str) -> None:
    plain, lossy = priced(plan), priced(plan, compression={"kind": "int8"})
    whole = sum(layer.repeat * sum(each.numel for each in layer.parameters) for layer in read_model("llama-tiny").layers)
    assert lossy.time.data < (0.4 if plan == "dp4" else 0.75) * plain.time.data
    assert lossy.memory.gradients - plain.memory.gradients == pytest.approx(4 * whole / 2, rel=0.1)
    assert priced("tp4", compression={"kind": "int8"}).time == priced("tp4").time


def test_replicas_that_meet_in_one_step_of_ten_pay_a_tenth() -> None:
    plain, rarely = priced("dp4"), priced("dp4", local={"replicas": 4, "steps": 10})
    assert rarely.time.data == pytest.approx(plain.time.data / 10, rel=0.2)
    assert rarely.memory.optimizer == 2 * plain.memory.optimizer


def test_low_rank_sends_least_of_wide_matrices() -> None:
    low, coded = (priced("dp4", compression={"kind": kind}).time.data for kind in ("low-rank", "int8"))
    assert low < coded
