"""Calibration: from what was measured to the cluster that the planner reads, and what is said to be odd."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from bench.emulation.emulated_cluster import scale_to_machine

from meshwright.cli.probe import measurement_text
from meshwright.core.errors import InputError
from meshwright.core.messages import translate
from meshwright.planner.cost.calibration import calibrate, predict_collective_seconds
from meshwright.planner.cost.compute import matmul_shapes
from meshwright.planner.cost.constants import CPU_OPS_PER_STAGE_PASS, CPU_UPDATE_PARAMS_PER_SECOND
from meshwright.planner.cost.links import LinkModel, link_model
from meshwright.planner.cost.plan_grid import TpEpShape
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import load_local_profile, read_cluster, save_local_profile
from meshwright.planner.inputs.cluster_syntax import parse_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.spec.cluster import (
    Cluster,
    ClusterProfile,
    CollectiveSample,
    DeviceProfile,
    Link,
    LinkSample,
    MatmulSample,
    find_network_tiers,
)
from meshwright.spec.plan import Plan, parse_plan

NEAR = Link(name="near", bandwidth=8e9, latency=60e-6, efficiency=1.0)
FAR = Link(name="far", bandwidth=50e6, latency=300e-6, efficiency=1.0)


def rank(number: int, host: int, rate: float = 100e9, share: float = 0.5) -> DeviceProfile:
    product = MatmulSample(precision="fp32", size=256, rate=rate)
    return DeviceProfile(
        rank=number,
        host=f"h{host}",
        name="cpu",
        products=(product,),
        bandwidth=20e9,
        share=share,
        own=share,
        memory=4e9,
    )


def pairs(ranks: int, rate: float = 1e8, **odd: float) -> tuple[LinkSample, ...]:
    """All of them; `odd` by name such as _2_5."""
    return tuple(
        LinkSample(first=a, second=b, latency=1e-4, bandwidth=odd.get(f"_{a}_{b}", rate))
        for a in range(ranks)
        for b in range(a + 1, ranks)
    )


def timings(links: LinkModel, sets: tuple[tuple[int, int], ...]) -> tuple[CollectiveSample, ...]:
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    bare = [
        CollectiveSample(kind=k, ranks=n, stride=s, size=float(z), seconds=1.0)
        for k in kinds
        for n, s in sets
        for z in (2**12, 2**16, 2**21)
    ]
    return tuple(each.but(seconds=predict_collective_seconds(links, each)) for each in bare)


def test_the_links_with_which_times_were_made_are_found_again() -> None:
    made = LinkModel((2,), (NEAR, FAR), handed=True)
    sets = ((2, 1), (4, 1), (2, 2))
    measured = ClusterProfile(devices=tuple(rank(n, n // 2) for n in range(4)), timings=timings(made, sets))
    found = calibrate(measured, parse_cluster("2x2:cpu"))
    assert found.odd == ()
    group, network = found.cluster.groups[0], found.cluster.network
    assert (group.nodes, group.devices, len(found.cluster.groups)) == (2, 2, 1)
    assert group.device.peak["fp32"] == 50e9
    for seen, true in ((group.link, NEAR), (network, FAR)):
        assert seen.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
        assert seen.latency == pytest.approx(true.latency, rel=0.1)
    for each in measured.timings:
        assert predict_collective_seconds(link_model(found.cluster), each) == pytest.approx(each.seconds, rel=0.05)


@pytest.mark.parametrize(("bandwidth", "latency"), [(450e9, 3e-6), (25e9, 12e-6)], ids=["nvswitch", "pcie"])
def test_the_fit_of_accelerators_finds_links_from_times_that_scatter(bandwidth: float, latency: float) -> None:
    """Two nodes of 8 devices. The times of 4 KiB to 1 GiB are those of the formulas, each up to 8 % off."""
    near = Link(name="near", bandwidth=bandwidth, latency=latency, efficiency=1.0)
    far = Link(name="far", bandwidth=min(bandwidth, 50e9), latency=2 * latency, efficiency=1.0)
    bare = [
        CollectiveSample(kind=kind, ranks=n, stride=stride, size=float(size), seconds=1.0)
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        for n, stride in ((2, 1), (4, 1), (8, 1), (16, 1), (2, 8))
        for size in (2**12, 2**16, 2**20, 2**24, 2**28, 2**30)
    ]
    made, scatter = LinkModel((8,), (near, far)), Random(3)
    timed = tuple(
        each.but(seconds=predict_collective_seconds(made, each) * scatter.uniform(0.92, 1.08)) for each in bare
    )
    devices = tuple(accelerator(number, number // 8) for number in range(16))
    found = calibrate(ClusterProfile(devices=devices, timings=timed), parse_cluster("2x8:h100"))
    assert found.odd == ()
    for seen, true in ((found.cluster.groups[0].link, near), (found.cluster.network, far)):
        assert seen.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
        assert seen.latency == pytest.approx(true.latency, rel=0.15)


def accelerator(number: int, host: int, **more: object) -> DeviceProfile:
    product = MatmulSample(precision="bf16", size=8192, rate=700e12)
    return rank(number, host).but(name="NVIDIA H100 80GB HBM3", products=(product,), share=1.0, own=0.0, **more)


def test_an_accelerator_has_the_memory_that_its_driver_reports_unless_less_is_described() -> None:
    """The driver of an H100 reports 79.2 of 80 GiB."""
    devices = tuple(accelerator(n, 0, memory=memory) for n, memory in enumerate((85017493504.0, 85017500000.0)))
    known = parse_cluster("1x2:h100")
    assert calibrate(ClusterProfile(devices=devices), known).cluster.groups[0].device.memory == 85017493504
    (group,) = known.groups
    less = known.but(groups=(group.but(device=group.device.but(memory=40e9)),))
    assert calibrate(ClusterProfile(devices=devices), less).cluster.groups[0].device.memory == 40e9


def test_the_text_of_a_probe_notes_warm_devices_and_how_they_are_connected() -> None:
    devices = tuple(
        accelerator(n, 0, warm=(620e12, 610e12, 615e12)[n], clock=1.395e9, power=696.0, gpudirect=n < 2)
        for n in range(3)
    )
    kinds = {(0, 1): ("nvlink", 2e11), (0, 2): ("pcie", 2e10), (1, 2): ("pcie", 2.5e10)}
    links = tuple(LinkSample(first=a, second=b, latency=1e-5, bandwidth=rate, kind=kind)
                  for (a, b), (kind, rate) in kinds.items())  # fmt: skip
    measured = ClusterProfile(devices=devices, pairs=links)
    text = "\n".join(measurement_text(calibrate(measured, parse_cluster("1x3:h100")), measured))
    assert "warm device 610.0 TFLOP/s of a layer, at 1395 MHz, 696 W (rank 1, the slowest)" in text
    assert "1 pairs of devices over NVLink: 200.0 GB/s to 200.0 GB/s" in text
    assert "2 pairs of devices over PCIe: 20.0 GB/s to 25.0 GB/s" in text
    assert "memory of ranks 0, 1 directly (GPUDirect)" in text


def test_what_ranks_lose_where_they_meet_is_found_again() -> None:
    near, far = NEAR.but(meeting=3e-4), FAR.but(meeting=2e-3)
    made, sets = LinkModel((2,), (near, far), handed=True), ((2, 1), (4, 1), (2, 2))
    rested = timings(LinkModel((2,), (NEAR, FAR), handed=True), sets)
    small = [each for each in rested if each.kind == "reduce_scatter" and each.size == 2**12]
    longer = tuple(each.but(seconds=predict_collective_seconds(made, each)) for each in small)
    devices = tuple(rank(n, n // 2) for n in range(4))
    found = calibrate(
        ClusterProfile(devices=devices, timings=rested, meetings=longer), parse_cluster("2x2:cpu")
    ).cluster
    assert found.groups[0].link.meeting == pytest.approx(near.meeting, rel=0.1)
    assert found.network.meeting == pytest.approx(far.meeting, rel=0.1)
    quick = tuple(each.but(seconds=0.0) for each in small)
    found = calibrate(ClusterProfile(devices=devices, timings=rested, meetings=quick), parse_cluster("2x2:cpu")).cluster
    assert (found.groups[0].link.meeting, found.network.meeting) == (0.0, 0.0)
    assert (
        calibrate(ClusterProfile(devices=devices, timings=rested), parse_cluster("2x2:cpu")).cluster.network.meeting
        == 0.0
    )


def test_unlike_nodes_become_groups_and_unlike_ranks_of_a_host_too() -> None:
    apart = ClusterProfile(devices=(rank(0, 0), rank(1, 1), rank(2, 2, share=0.25), rank(3, 3, share=0.25)))
    found = calibrate(apart, parse_cluster("4x1:cpu")).cluster
    assert [(group.nodes, group.devices, group.device.peak["fp32"]) for group in found.groups] == [
        (2, 1, 50e9),
        (2, 1, 25e9),
    ]
    together = ClusterProfile(devices=(rank(0, 0), rank(1, 0, share=0.25)))
    found = calibrate(together, parse_cluster("1x2:cpu")).cluster
    assert [(group.nodes, group.devices) for group in found.groups] == [(1, 1), (1, 1)]


def test_a_slow_device_a_slow_rank_and_a_slow_link_are_named() -> None:
    devices = tuple(rank(n, n, rate=86e9 if n == 3 else 100e9) for n in range(8))
    said = calibrate(ClusterProfile(devices=devices, pairs=pairs(8, _2_5=5e7)), parse_cluster("8x1:cpu")).odd
    assert said == ("the link between ranks 2 and 5 reaches 50 % of the bandwidth of the others (50.0 MB/s)",)
    slow = tuple(rank(n, n, rate=80e9 if n == 3 else 100e9, share=0.5) for n in range(8))
    groups = calibrate(ClusterProfile(devices=slow), parse_cluster("8x1:cpu")).cluster.groups
    assert [group.nodes for group in groups] == [3, 1, 4]
    all_of_one = {f"_{min(a, 4)}_{max(a, 4)}": 4.8e7 for a in range(8) if a != 4}
    assert find_network_tiers(pairs(8, **all_of_one), 8) == (
        0,
        ("all links of rank 4 reach 48 % of the bandwidth of the others (48.0 MB/s of 100.0 MB/s)",),
    )


def test_blocks_of_hosts_behind_one_switch_are_a_tier() -> None:
    inside = {f"_{a}_{b}": 1e9 for a in range(8) for b in range(a + 1, 8) if a // 4 == b // 4}
    assert find_network_tiers(pairs(8, **inside), 8) == (4, ())
    found = calibrate(
        ClusterProfile(devices=tuple(rank(n, n) for n in range(8)), pairs=pairs(8, **inside)), parse_cluster("8x1:cpu")
    )
    assert [group.link.span for group in found.cluster.groups] == [4]


def test_ranks_that_share_the_cores_of_a_host_have_their_mean_speed() -> None:
    """Three met on one core of two and the fourth had the other for itself: so they would not be again."""
    got = (0.34, 0.33, 0.33, 1.0)
    devices = tuple(rank(n, 0).but(share=share, own=0.5) for n, share in enumerate(got))
    found = calibrate(ClusterProfile(devices=devices), parse_cluster("1x4:cpu"))
    assert [(group.nodes, group.devices) for group in found.cluster.groups] == [(1, 4)] and found.odd == ()
    assert found.cluster.groups[0].device.peak["fp32"] == pytest.approx(50e9)


def test_a_rank_alone_is_faster_only_where_ranks_share_cores() -> None:
    four = ClusterProfile(devices=tuple(rank(n, 0) for n in range(4)))  # four ranks on two cores
    quota = ClusterProfile(devices=tuple(rank(n, n) for n in range(4)))  # containers with half a core each
    found = [calibrate(four, parse_cluster("1x4:cpu")).cluster, calibrate(quota, parse_cluster("4x1:cpu")).cluster]
    assert [cluster.groups[0].device.share for cluster in found] == [0.5, 1.0]


def test_beside_other_programs_a_rank_counts_with_its_own_share_and_that_is_said() -> None:
    disturbed = ClusterProfile(
        devices=(rank(0, 0).but(share=0.1, own=0.5), rank(1, 0).but(share=0.12, own=0.5)), busy=1.6
    )
    found = calibrate(disturbed, parse_cluster("1x2:cpu"))
    assert found.cluster.groups[0].device.peak["fp32"] == 50e9
    assert len(found.odd) == 1 and found.odd[0].startswith("other programs kept 1.6 processors busy")
    alone = calibrate(disturbed.but(busy=0.0), parse_cluster("1x2:cpu"))
    assert "rank 0 got 11 % of a processor instead of the expected 50 %" in alone.odd


def test_local_is_what_was_measured_here_unless_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURED", "1")
    machine = ("a machine",)
    cluster = parse_cluster("1x4:cpu")
    assert load_local_profile(4, machine) is None
    path = save_local_profile(cluster, machine)
    assert path is not None and load_local_profile(4, machine) == cluster and load_local_profile(3, machine) is None
    monkeypatch.setenv("MESHWRIGHT_MEASURED", "0")
    assert load_local_profile(4, machine) is None
    monkeypatch.setenv("MESHWRIGHT_MEASURED", "1")
    path.write_text('{"name": "of another version"}')
    assert load_local_profile(4, machine) is None


def test_a_cluster_is_scaled_to_the_cores_so_that_speeds_and_links_keep_their_ratios() -> None:
    cluster = unlike()
    found = scale_to_machine(cluster, cores=2, core=80e9)
    assert found.nodes == (0, 0, 1)
    assert found.shares[0] == pytest.approx(found.shares[2] / 2)
    assert sum(found.shares) <= 2
    assert found.shares[2] * 80e9 * found.motion == pytest.approx(80e9)
    assert [wire * found.motion for wire in found.wires] == pytest.approx([2.5e9, 1.25e9])
    with pytest.raises(InputError, match="emulate fewer devices"):
        scale_to_machine(parse_cluster("50x2:cpu"), cores=2, core=80e9)


def unlike() -> Cluster:
    cluster = parse_cluster("1x2:cpu+1x1:cpu@1.25GB/s")
    slow = cluster.groups[0]
    device = slow.device.but(peak={name: rate / 2 for name, rate in slow.device.peak.items()})
    network = cluster.network.but(efficiency=1.0)
    return cluster.but(groups=(slow.but(device=device), cluster.groups[1]), network=network)


def test_a_measured_cluster_is_read_from_a_file_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(unlike().to_json())
    assert read_cluster(str(tmp_path / "measured.json")) == unlike()


def test_a_rank_with_a_fraction_of_a_core_launches_operations_that_much_slower() -> None:
    devices = tuple(rank(n, 0, share=0.25).but(launch=5e-6) for n in range(4))
    slow = calibrate(ClusterProfile(devices=devices), parse_cluster("1x4:cpu")).cluster
    assert slow.groups[0].device.launch == pytest.approx(20e-6)
    job = resolve_job(read_job(None, (), {"model.name": "llama-tiny", "workload.batch": 16}))

    def step(launch: float, micro_batch: int) -> float:
        group = slow.groups[0].but(device=slow.groups[0].device.but(launch=launch))
        return estimate(
            job.but(cluster=slow.but(groups=(group,))), Plan(dp_replicate=4, micro_batch=micro_batch)
        ).time.step

    operations = (
        9.0 * sum(layer.repeat * (1 + matmul_shapes(layer, TpEpShape(1)).products.sum()) for layer in job.model.layers)
        + CPU_OPS_PER_STAGE_PASS
    )
    for micro_batch in (1, 4):
        more = (step(20e-6, micro_batch) - step(5e-6, micro_batch)) / (4 / micro_batch)
        assert more == pytest.approx(operations * 15e-6, rel=1e-6)


def test_what_the_processors_of_a_node_update_is_what_its_ranks_do_together() -> None:
    devices = tuple(
        rank(n, n // 2, rate=100e9 if n < 2 else 50e9, share=0.5).but(update=2e8 if n < 2 else 3e8) for n in range(4)
    )
    measured = ClusterProfile(devices=devices, pairs=pairs(4))
    assert [group.host_update for group in calibrate(measured, parse_cluster("2x2:cpu")).cluster.groups] == [2e8, 3e8]


@pytest.mark.parametrize(
    ("measured", "rate"),
    [((0.0, 0.0), CPU_UPDATE_PARAMS_PER_SECOND), ((1e9, 1e9), 1e9), ((1e10, 2e9), 2e9), ((0.0, 2e9), 2e9)],
)
def test_a_cpu_update_is_priced_by_the_slowest_measured_host_or_a_constant(
    measured: tuple[float, float], rate: float
) -> None:
    known = parse_cluster("1x4:a100-80gb+1x4:a100-40gb")
    known = known.but(
        groups=tuple(group.but(host_bandwidth=1e20) for group in known.groups)
    )  # else the ways down and up are beside it
    job = resolve_job(read_job(None, (), {"model.name": "gpt2", "workload.batch": 8, "workload.precision": "bf16"}))

    def offload(cluster: Cluster) -> float:
        return estimate(job.but(cluster=cluster), parse_plan("dp8.z1.off-optimizer")).time.offload

    hosts = known.but(
        groups=tuple(group.but(host_update=each) for group, each in zip(known.groups, measured, strict=True))
    )
    free = known.but(groups=tuple(group.but(host_update=1e30) for group in known.groups))
    largest = -(-job.model.parameters // 8)
    assert offload(hosts) - offload(free) == pytest.approx(largest * 4 / rate, rel=0.01)


def test_a_probe_is_said_in_chinese_down_to_what_is_odd() -> None:
    inside = {f"_{a}_{b}": 1e9 for a in range(8) for b in range(a + 1, 8) if a // 4 == b // 4}
    slow = tuple(rank(n, n // 2, rate=80e9 if n == 3 else 100e9).but(share=0.1 if n == 1 else 0.5) for n in range(8))
    timed = (CollectiveSample(kind="all_reduce", ranks=8, stride=1, size=2.0**16, seconds=1.0),)
    for measured, known in (
        (ClusterProfile(devices=slow, pairs=pairs(8, _2_5=5e7), timings=timed, meetings=timed), "8x1:cpu"),
        (ClusterProfile(devices=slow[:4], pairs=pairs(4, _0_2=1e7, _1_2=1e7, _2_3=1e7), busy=2.0), "1x8:a100-80gb"),
        (ClusterProfile(devices=tuple(rank(n, n) for n in range(8)), pairs=pairs(8, **inside)), "1x8:a100-80gb"),
        (ClusterProfile(devices=(rank(0, 0),)), "1x1:cpu"),
    ):
        lines = list(measurement_text(calibrate(measured, parse_cluster(known)), measured))
        said, chinese = "\n".join(lines), "\n".join(translate(line, "zh") for line in lines)
        assert said.count("\n") == chinese.count("\n")
        assert set(re.findall("[A-Za-z]{3,}", chinese)) <= {
            "cpu",
            "CPU",
            "GFLOP",
            "MiB",
            "GiB",
            "KiB",
            "rank",
            "all",
            "reduce",
            "gb",
        }, chinese
