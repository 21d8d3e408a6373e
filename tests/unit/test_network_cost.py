"""What crosses between nodes, priced: tiers, compressed gradients, replicas that meet rarely."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshwright as mw
from meshwright.cli.launch_plan import choose_plan
from meshwright.cli.main import main
from meshwright.cli.verify import _lossy_notes
from meshwright.core.secure_channel import collective_environment
from meshwright.elastic.launch.submission import network_settings
from meshwright.planner.cost.constants import MIN_BUCKET_BYTES
from meshwright.planner.cost.links import LinkModel, collective_rates, link_model
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.inputs.model_parser import read_model
from meshwright.planner.search.advice import rank_improvements
from meshwright.planner.search.infeasible import fastest_plan
from meshwright.spec.cluster import Link
from meshwright.spec.enums import DEFAULT_BUCKET_BYTES
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
    tiers, flat = (
        collective_rates(LinkModel((2,), (NEAR, FAR), handed=True), 4, 1),
        collective_rates(LinkModel((1,), (NEAR, FAR), handed=True), 4, 1),
    )
    assert float(flat.gather(8e6) / tiers.gather(8e6)) == pytest.approx(3.0, rel=0.1)
    assert float(flat.reduce(8e6) / tiers.reduce(8e6)) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("plan", ["dp4", "dp4.z1"])
def test_fewer_bytes_take_less_time_and_what_is_kept_back_takes_memory(plan: str) -> None:
    plain, lossy = priced(plan), priced(plan, compression={"kind": "int8"})
    whole = sum(
        layer.repeat * sum(each.numel for each in layer.parameters) for layer in read_model("llama-tiny").layers
    )
    assert lossy.time.data < (0.4 if plan == "dp4" else 0.75) * plain.time.data
    assert lossy.memory.gradients - plain.memory.gradients == pytest.approx(4 * whole / 2, rel=0.1)
    assert priced("tp4", compression={"kind": "int8"}).time == priced("tp4").time


def test_replicas_that_meet_in_one_step_of_ten_pay_a_tenth() -> None:
    plain, rarely = priced("dp4"), priced("dp4", local={"replicas": 4, "steps": 10})
    assert rarely.time.data == pytest.approx(plain.time.data / 10, rel=0.2)
    assert rarely.memory.optimizer == 2 * plain.memory.optimizer


def test_tensor_ranks_of_convolutions_sum_one_map_of_each_block_in_both_passes() -> None:
    cluster, model = read_cluster("1x2:cpu"), read_model("convnet-tiny")
    job = Job(model=model, cluster=cluster, workload=Workload(batch=8, sequence=1, precision="fp32"))
    whole, sharded = estimate(job, parse_plan("dp2.mb4")), estimate(job, parse_plan("tp2.mb8"))
    block = next(layer for layer in model.layers if layer.name == "block")
    once = float(collective_rates(link_model(cluster), 2, 1).reduce(8 * block.output * 4))
    assert sharded.time.tensor == pytest.approx(2 * block.repeat * once)
    assert 0.5 < sharded.memory.parameters / whole.memory.parameters < 0.6


def test_low_rank_sends_least_of_wide_matrices() -> None:
    low, coded = (priced("dp4", compression={"kind": kind}).time.data for kind in ("low-rank", "int8"))
    assert low < coded


def test_what_would_change_the_answer_names_what_fewer_bytes_bring() -> None:
    job = Job(
        model=read_model("llama-tiny"), cluster=read_cluster("2x2:cpu@1Gb"), workload=Workload(batch=16, sequence=64)
    )
    job = job.but(pins={"tp": 1, "pp": 1, "cp": 1})
    found = {it.name: it.speed for it in rank_improvements(job, fastest_of(job))}
    assert found["int8"] > 1.0 and found["local"] > 1.0
    asked = {
        it.name
        for it in rank_improvements(
            job.but(workload=Workload(batch=16, sequence=64, compression={"kind": "int8"})), 1.0
        )
    }  # type: ignore[arg-type]
    assert not {"int8", "low-rank"} & asked


def fastest_of(job: Job) -> float:
    best = fastest_plan(job)
    assert best is not None
    return best.seconds


def test_a_launcher_is_told_each_variable_with_its_reason() -> None:
    ours = {it.name: it for it in network_settings(read_cluster("2x8:a100-80gb@ethernet-100"), "ens5")}
    assert (ours["GLOO_SOCKET_IFNAME"].value, ours["NCCL_SOCKET_IFNAME"].value) == (
        "ens5",
        "=ens5",
    )  # to NCCL a name without = is how one begins
    assert ours["NCCL_IB_DISABLE"].value == "1" and "no InfiniBand" in ours["NCCL_IB_DISABLE"].reason
    assert all(it.reason for it in ours.values())
    assert "NCCL_IB_DISABLE" not in {
        it.name for it in network_settings(read_cluster("2x8:a100-80gb"), "ens5") if it.value
    }
    assert not {it.name for it in network_settings(read_cluster("1x8:a100-80gb"), "ens5")} & {
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
    }


@pytest.mark.parametrize("link", ["100Gb", "8x100Gb", "12.5GB/s"])
def test_ethernet_sets_sockets_and_infiniband_stays_enabled(link: str) -> None:
    rate, ethernet, wide = (
        {it.name: it for it in network_settings(read_cluster(f"4x8:h100@{name}"))}
        for name in (link, "ethernet-100", "ib-ndr")
    )
    assert {name for name, it in ethernet.items() if it.value} - {name for name, it in rate.items() if it.value} == {
        "NCCL_IB_DISABLE"
    }
    assert f"{link} is a rate" in rate["NCCL_IB_DISABLE"].reason
    assert rate["NCCL_NSOCKS_PERTHREAD"].value == "4" and "NCCL_NSOCKS_PERTHREAD" not in wide


def test_verify_says_what_the_workload_changes() -> None:
    (line,) = _lossy_notes(Workload(compression={"kind": "int8"}))  # type: ignore[arg-type]
    assert "1/254" in line and "without it" in line
    assert _lossy_notes(Workload()) == ()


def test_buckets_are_smaller_on_a_slow_link_with_compute_to_overlap() -> None:
    def chosen(cluster: str) -> int:
        job = Job(
            model=read_model("llama-tiny"),
            cluster=read_cluster(cluster),
            workload=Workload(batch=16, sequence=64),
            pins={"dp": 4},
        )
        found = fastest_plan(job)
        assert found is not None
        return found.plan.bucket

    assert MIN_BUCKET_BYTES <= chosen("2x2:cpu@1Gb") < DEFAULT_BUCKET_BYTES == chosen("1x4:cpu")


def test_a_plan_that_is_named_has_the_bucket_that_the_search_gave_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model.name": "gpt2", "cluster.name": "2x2:cpu@100Mb", "workload.batch": 32}
    best = mw.plan(resolve_job(read_job(None, (), options)), 1)[0]
    assert best.plan.bucket < DEFAULT_BUCKET_BYTES
    named = read_job(None, (), {**options, "plan.name": best.plan.name})
    assert mw.estimate(resolve_job(named), best.plan.name) == best.estimate
    assert mw.plan(resolve_job(named), 1)[0].plan == best.plan == choose_plan(named, None, None, {}, None).plan
    shared = ["--model", "gpt2", "--cluster", "2x2:cpu@100Mb", "--batch", "32", "--plan", best.plan.name]
    assert main(["estimate", *shared, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["bucket"] == best.plan.bucket
    before = best.plan.but(bucket=DEFAULT_BUCKET_BYTES)  # a run of that name goes on as it was begun, to the bit
    (tmp_path / "plan.json").write_text(before.to_json())
    assert choose_plan(named, None, tmp_path, {}, None).plan == best.plan  # no step yet
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert choose_plan(named, None, tmp_path, {}, None).plan == before
    (tmp_path / "other.json").write_text(before.to_json())
    written = read_job(None, (), {**options, "plan.name": str(tmp_path / "other.json")})
    assert choose_plan(written, None, None, {}, None).plan == before


def test_a_node_names_its_network_interface_to_gloo_and_nccl() -> None:
    here = lambda: {
        (name, it.address)
        for name, found in psutil.net_if_addrs().items()
        for it in found
        if it.family == socket.AF_INET
    }
    before = here()
    said = {address: collective_environment(address) for _, address in before}
    stay = before & here()  # devices come and go: other tests make some
    assert stay
    for name, address in stay:
        near = address.startswith("127.")
        assert said[address] == {"GLOO_SOCKET_IFNAME": name} | ({} if near else {"NCCL_SOCKET_IFNAME": f"={name}"})
