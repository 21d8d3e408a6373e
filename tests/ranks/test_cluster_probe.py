"""What `probe` finds of an emulated cluster: tiers and slow links, every time; the same twice; one line for what cannot be."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from test_cluster import on_ranks, permitted

from meshwright.cost.calibration import calibrated
from meshwright.cost.tiers import tiers
from meshwright.emulate.run import emulated
from meshwright.emulate.scale import Scaled
from meshwright.intake.clusters import parse_cluster
from meshwright.parallel.mesh import make_mesh
from meshwright.probe.device import host_identity
from meshwright.probe.machine import measure
from meshwright.probe.network import Network
from meshwright.spec.measurement import QUIET, Measurement, Pair
from meshwright.spec.plan import Plan

EIGHT = tuple(range(8))


def pairs() -> list[Pair]:
    """As rank 0 measures them, every rank on a host of its own."""
    mesh = make_mesh(Plan(dp_replicate=dist.get_world_size()))
    return Network(mesh, tuple((rank,) for rank in range(dist.get_world_size()))).pairs()


def looked(odd: int) -> tuple[str, ...]:
    """What is said of eight hosts of which one has a wire of a quarter of the rate."""
    wires = tuple(1e6 if rank == odd else 4e6 for rank in EIGHT)
    with emulated(Scaled((0.2,) * 8, EIGHT, wires, 1.0)) as cluster:
        return tiers(on_ranks(cluster, pairs)[0], 8).odd


@pytest.mark.soak
@pytest.mark.parametrize("time", range(20))
def test_an_odd_slow_link_among_eight_ranks_is_found_every_time(time: int) -> None:
    if permitted():
        (line,) = looked(time % 8)
        assert line.startswith(f"all links of rank {time % 8} carry ")


def probed(wire: float) -> Measurement:
    nodes = Scaled(shares=(0.45,) * 4, nodes=(0, 0, 1, 1), wires=(wire, wire), motion=1.0)
    with emulated(nodes) as cluster:
        return Measurement.model_validate(on_ranks(cluster, _measured)[0])


def _measured() -> dict[str, object]:
    return measure().model_dump(mode="json")


@pytest.mark.soak
@pytest.mark.parametrize("time", range(20))
def test_the_two_tiers_of_a_shaped_cluster_are_found_every_time(time: int) -> None:
    if not permitted():
        return
    found = probed(20e6)
    cluster = calibrated(found, parse_cluster("2x2:cpu@1Gb")).cluster
    assert [(group.nodes, group.devices) for group in cluster.groups] == [(2, 2)]
    assert cluster.groups[0].link.bandwidth > 4 * cluster.network.bandwidth
    assert found.seconds < 20.0 or found.busy > QUIET


@pytest.mark.soak
def test_a_probe_repeats_itself_within_ten_percent() -> None:
    if not permitted():
        return
    first, again = probed(20e6), probed(20e6)
    for one, other in zip(first.devices, again.devices, strict=True):
        assert other.peak("fp32") == pytest.approx(one.peak("fp32"), rel=0.1)
    if max(first.busy, again.busy) <= QUIET:
        one, other = (calibrated(found, parse_cluster("2x2:cpu@1Gb")).cluster for found in (first, again))
        assert other.network.bandwidth == pytest.approx(one.network.bandwidth, rel=0.1)
        assert other.groups[0].link.bandwidth == pytest.approx(one.groups[0].link.bandwidth, rel=0.1)


def tiered() -> tuple[str, str]:
    """How all ranks meet in a probe, and in the runtime."""
    mesh = make_mesh(Plan(dp_replicate=dist.get_world_size()))
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host_identity())
    members = tuple(tuple(rank for rank, host in enumerate(hosts) if host == name) for name in dict.fromkeys(hosts))
    group = Network(mesh, members).group(tuple(range(dist.get_world_size())))
    assert group is not None and mesh.world is not None
    return type(group.lanes).__name__, type(mesh.world.lanes).__name__


def test_collectives_are_measured_the_way_the_runtime_takes() -> None:
    if not permitted():
        return
    with emulated(Scaled((0.45,) * 4, (0, 0, 1, 1), (4e6, 4e6), 1.0)) as cluster:
        assert set(on_ranks(cluster, tiered)) == {("Tiers", "Tiers")}
