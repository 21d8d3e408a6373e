"""How a described cluster becomes shares of this machine's cores and rates of its links.

The fastest device takes as much of a core as the cores allow for all, each other one its part of that: speeds stand to each other as described.
Time then runs slower by one factor, `motion`: the described peak over what the share of a core gives. Links between nodes carry their
described rate divided by the same factor and their latency times it, so that compute and communication stand to each other as described, too.

>>> from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
>>> def group(peak): return NodeGroup(nodes=1, devices=1, device=Device(name="a", memory=1e9, bandwidth=1e9, peak={"fp32": peak}), link=Link(name="in", bandwidth=1e9))
>>> found = scaled(Cluster(name="pair", groups=(group(2e12), group(1e12)), network=Link(name="out", bandwidth=1e9, efficiency=1.0)), cores=1, core=80e9)
>>> [round(share, 3) for share in found.shares], round(found.motion, 1), [round(rate / 1e6, 1) for rate in found.wires]
([0.6, 0.3], 33.3, [30.0, 30.0])
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.spec.cluster import Cluster

LEFT = 0.9
"""Of the cores, what ranks may take: the rest is for the network and whoever watches."""

LEAST = 0.02
"""Share of a core below which a process hardly moves."""


class Scaled(NamedTuple):
    """By rank: `shares` of a core, `nodes` (the node that it is on); by node: `wires`, bytes/s to the others; by how much time is slower."""

    shares: tuple[float, ...]
    nodes: tuple[int, ...]
    wires: tuple[float, ...]
    motion: float
    delay: float = 0.0
    """Seconds from one node to another, on top of what this machine takes anyway."""


def scaled(cluster: Cluster, cores: float, core: float) -> Scaled:
    """`cores` of `core` FLOP/s each play `cluster`. Raises InputError where that is too much for them."""
    speeds: list[float] = []
    nodes: list[int] = []
    wires: list[float] = []
    for group in cluster.groups:
        for _ in range(group.nodes):
            nodes += [len(wires)] * group.devices
            speeds += [_speed(cluster, group.device.peak) * group.device.efficiency] * group.devices
            wires.append(cluster.network.bandwidth * cluster.network.efficiency * group.devices)
    fastest = max(speeds)
    most = min(1.0, LEFT * cores * fastest / sum(speeds))
    shares = [most * speed / fastest for speed in speeds]
    if min(shares) < LEAST:
        raise InputError(
            f"cluster {cluster.name!r}: {len(speeds)} ranks on {cores:g} cores leave the slowest {min(shares):.1%} of a core and it needs {LEAST:.0%}; "
            "emulate fewer devices, or play it with `meshwright simulate`"
        )
    motion = fastest / (most * core)
    return Scaled(tuple(shares), tuple(nodes), tuple(wire / motion for wire in wires), motion, cluster.network.latency * motion)


def _speed(cluster: Cluster, peak: dict[str, float]) -> float:
    """FLOP/s at a precision that all devices have: fp32, else the first that they share."""
    common = [name for name in ("fp32", "tf32", "bf16", "fp16", "fp64") if all(group.device.peak.get(name) for group in cluster.groups)]
    if not common:
        raise InputError(f"cluster {cluster.name!r}: its devices have no precision in common, so that their speeds cannot be compared")
    return peak[common[0]]
