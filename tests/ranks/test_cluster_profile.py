"""What `probe` finds of an emulated cluster: tiers and slow links, every time; the same twice; one line for what cannot
be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench.emulation.emulated_cluster import ScaledCluster, emulate_cluster
from hosts import hosts
from pool import Pool
from ports import connected, reserved
from test_emulated_cluster import need_networks, on_ranks
from torch import nn

from meshwright.cli.launch_plan import _scale_to_world, _warn_slow_group
from meshwright.core.messages import translate
from meshwright.planner.cost.calibration import calibrate
from meshwright.planner.inputs.cluster_syntax import parse_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.host_process import host_id
from meshwright.runtime.profiler.device import measure_cluster, measure_update_rate
from meshwright.runtime.profiler.links import COMPUTE_SECONDS, MAX_SYNC_TURNS, CollectiveProfiler
from meshwright.spec.cluster import (
    MAX_BUSY_PROCESSORS,
    ClusterProfile,
    DeviceProfile,
    LinkSample,
    MatmulSample,
    find_network_tiers,
)
from meshwright.spec.plan import Plan
from meshwright.train.trainer import parallelize

EIGHT = tuple(range(8))


def pairs() -> list[LinkSample]:
    """As rank 0 measures them, every rank on a host of its own."""
    mesh = make_parallel_context(Plan(dp_replicate=dist.get_world_size()))
    return CollectiveProfiler(mesh, tuple((rank,) for rank in range(dist.get_world_size()))).pairs()


def looked(odd: int) -> tuple[str, ...]:
    """What is said of eight hosts of which one has a wire of a quarter of the rate."""
    wires = tuple(1e6 if rank == odd else 4e6 for rank in EIGHT)
    with emulate_cluster(ScaledCluster((0.2,) * 8, EIGHT, wires, 1.0)) as cluster:
        return find_network_tiers(on_ranks(cluster, pairs)[0], 8).odd


@pytest.mark.soak
@pytest.mark.parametrize("run", range(20))
def test_an_odd_slow_link_among_eight_ranks_is_found_every_time(run: int) -> None:
    need_networks()
    (line,) = looked(run % 8)
    assert line.startswith(f"all links of rank {run % 8} reach ")


def probed(wire: float) -> ClusterProfile:
    nodes = ScaledCluster(shares=(0.45,) * 4, nodes=(0, 0, 1, 1), wires=(wire, wire), motion=1.0)
    with emulate_cluster(nodes) as cluster:
        return ClusterProfile.model_validate(on_ranks(cluster, _measured)[0])


def _measured() -> dict[str, object]:
    return measure_cluster().model_dump(mode="json")


@pytest.mark.soak
@pytest.mark.parametrize("run", range(20))
def test_the_two_tiers_of_a_shaped_cluster_are_found_every_time(run: int) -> None:
    need_networks()
    found = probed(20e6)
    cluster = calibrate(found, parse_cluster("2x2:cpu@1Gb")).cluster
    assert [(group.nodes, group.devices) for group in cluster.groups] == [(2, 2)]
    assert cluster.groups[0].link.bandwidth > 4 * cluster.network.bandwidth
    assert found.seconds < 20.0 or found.busy > MAX_BUSY_PROCESSORS


@pytest.mark.soak
def test_a_probe_repeats_itself_within_ten_percent() -> None:
    need_networks()
    first, again = probed(20e6), probed(20e6)
    for one, other in zip(first.devices, again.devices, strict=True):
        assert other.peak("fp32") == pytest.approx(one.peak("fp32"), rel=0.1)
    if max(first.busy, again.busy) <= MAX_BUSY_PROCESSORS:
        one, other = (calibrate(found, parse_cluster("2x2:cpu@1Gb")).cluster for found in (first, again))
        assert other.network.bandwidth == pytest.approx(one.network.bandwidth, rel=0.1)
        assert other.groups[0].link.bandwidth == pytest.approx(one.groups[0].link.bandwidth, rel=0.1)


def tiered() -> tuple[str, str]:
    """How all ranks meet in a probe, and in the runtime."""
    mesh = make_parallel_context(Plan(dp_replicate=dist.get_world_size()))
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, host_id())
    members = tuple(tuple(rank for rank, host in enumerate(names) if host == name) for name in dict.fromkeys(names))
    group = CollectiveProfiler(mesh, members).group(tuple(range(dist.get_world_size())))
    assert group is not None and mesh.world is not None
    return type(group.shm).__name__, type(mesh.world.shm).__name__


def tiered_on_two_hosts() -> tuple[str, str]:
    with hosts(2):
        return tiered()


def test_collectives_of_two_hosts_are_measured_the_way_the_runtime_takes(ranks: Pool) -> None:
    assert set(ranks.run(4, tiered_on_two_hosts)) == {("HierarchicalGroup", "HierarchicalGroup")}


@pytest.mark.soak
def test_collectives_are_measured_the_way_the_runtime_takes() -> None:
    need_networks()
    with emulate_cluster(ScaledCluster((0.45,) * 4, (0, 0, 1, 1), (4e6, 4e6), 1.0)) as cluster:
        assert set(on_ranks(cluster, tiered)) == {("HierarchicalGroup", "HierarchicalGroup")}


def computing() -> tuple[float, float, float]:
    """Processor seconds of this rank while it computes between meetings; seconds of a turn, and of one whose meeting
    only takes time."""
    network = CollectiveProfiler(make_parallel_context(Plan(dp_replicate=2)), ((0, 1),), share=0.5)
    began = time.process_time()
    turn = network._computing(lambda: None)
    return time.process_time() - began, turn, network._computing(lambda: time.sleep(0.03))


def test_ranks_compute_between_meetings(ranks: Pool) -> None:
    for spent, turn, slept in ranks.run(2, computing):
        assert spent >= MAX_SYNC_TURNS * COMPUTE_SECONDS / 2
        assert turn >= COMPUTE_SECONDS / 2
        assert slept >= 0.03 + COMPUTE_SECONDS / 2


def updates() -> tuple[float, float]:
    """Parameters in a second of this processor: as probe measures them, and as a trainer's update does on its own
    weights; the most of several turns, as nothing makes either faster than it is."""
    trainer = parallelize(
        nn.Linear(1 << 12, 1 << 11), torch.optim.AdamW, "dp1", loss=lambda output, batch: output.mean()
    )
    trainer.step({"input": torch.ones(1, 1 << 12)})
    measured, trained = [], []
    for _ in range(5):
        measured.append(measure_update_rate(torch.device("cpu")))
        began = time.thread_time()
        trainer.engine.updater.step(trainer.optimizer, 1.0)
        trained.append(((1 << 23) + (1 << 11)) / (time.thread_time() - began))
    return max(measured), max(trained)


def test_the_processors_of_a_rank_are_measured_at_what_an_update_does(ranks: Pool) -> None:
    ((measured, trained),) = ranks.run(1, updates)
    assert trained / 2 < measured < trained * 2


@pytest.mark.soak
def test_a_rank_that_ends_during_a_probe_is_said_in_one_line(tmp_path: Path) -> None:
    """Two ranks as a launcher starts them, the second one killed while both measure."""
    command = [sys.executable, "-m", "meshwright.cli.main", "probe", "--save", str(tmp_path / "found.json")]
    ranks = []
    with reserved() as port:
        for rank in (0, 1):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = {
                **os.environ,
                **place,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "MESHWRIGHT_SHARED": "0",
            }
            ranks.append(
                subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            )
        while not connected(ranks[1].pid, port):
            assert ranks[1].poll() is None
            time.sleep(0.05)
    time.sleep(1.0)
    ranks[1].kill()
    try:
        _, said = ranks[0].communicate(timeout=900)
    finally:
        ranks[0].kill()
        ranks[1].communicate()
    lines = [line for line in said.splitlines() if line.strip() and "socket.cpp" not in line]
    assert ranks[0].returncode == 1 and not (tmp_path / "found.json").exists()
    assert (
        len(lines) == 2
        and lines[0].startswith("measuring 2 ranks")
        and "lost the connection to another rank during the measurement" in lines[1]
    )


def test_what_the_description_says_and_the_machine_does_not_is_said() -> None:
    devices = tuple(
        DeviceProfile(
            rank=rank,
            host="a",
            name="cpu",
            products=(MatmulSample(precision="fp32", size=64, rate=1e9),),
            bandwidth=1e9,
            memory=1e9,
        )
        for rank in (0, 1)
    )
    found = ClusterProfile(devices=devices)
    assert not calibrate(found, parse_cluster("1x2:cpu")).odd
    for cluster, words in (
        ("1x4:cpu", "has 4 devices, but 2 ranks"),
        ("2x1:cpu@1Gb", "has 2 nodes, but the ranks ran on 1"),
        ("1x2:a100-80gb", "has a100-80gb, but the ranks ran on cpu"),
    ):
        (line,) = calibrate(found, parse_cluster(cluster)).odd
        assert words.lower() in line.lower() and "\n" not in line


def test_ranks_of_a_launcher_plan_a_measured_heterogeneous_cluster() -> None:
    """A description named local with two groups is all of its devices, and a plan that would leave a group out is
    said."""
    cluster = parse_cluster("1x2:cpu+1x2:cpu@1Gb")
    fast, slow = cluster.groups
    weak = slow.device.but(name="cpu", peak={name: rate / 20 for name, rate in slow.device.peak.items()})
    cluster = cluster.but(name="local", groups=(fast, slow.but(device=weak)))
    question = resolve_job(
        read_job(None, (), {"model.name": "llama-tiny", "workload.batch": 16, "workload.sequence": 64})
    ).but(cluster=cluster)
    assert _scale_to_world(question, 4) == question
    assert _scale_to_world(question.but(cluster=cluster.but(groups=(fast,))), 4).cluster.devices == 4
    step = search_plans(question, 1, runnable=True).chosen.estimate.time.step
    (line,) = _warn_slow_group(question, step)
    assert (
        translate(line).startswith("  without group 1 of the cluster ")
        and "start ranks only on the other nodes" in line
    )
