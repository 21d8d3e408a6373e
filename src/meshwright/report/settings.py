"""What a launcher sets so that ranks find each other over the right network: variables of NCCL and gloo from a cluster's links, each with its
reason. What is not here is left to NCCL, which measures rings, trees and switches itself.

Sources: NCCL's documentation of its environment variables (interfaces; sockets: 4 threads of 4 sockets from 100 Gbit/s Ethernet on), PyTorch's
page on torch.distributed (choosing the network interface).
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.cluster import Cluster

WIDE_ETHERNET = 10e9
"""Bytes/s of a node's Ethernet from which one socket does not fill it."""


class Setting(NamedTuple):
    """An environment variable, its value and why."""

    name: str
    value: str
    reason: str


def settings_of(cluster: Cluster, interface: str = "") -> tuple[Setting, ...]:
    """Of the ranks of `cluster`. `interface`: the network device between nodes, where its name is known (`ip route get ADDRESS` says it).

    >>> from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
    >>> node = NodeGroup(nodes=2, devices=8, device=Device(name="cpu", memory=1e9, bandwidth=1e9, peak={"fp32": 1e9}), link=Link(name="memory", bandwidth=1e9))
    >>> [f"{it.name}={it.value}" for it in settings_of(Cluster(name="pair", groups=(node,), network=Link(name="Ethernet", bandwidth=1e9)), "eth1")]
    ['OMP_NUM_THREADS=1', 'GLOO_SOCKET_IFNAME=eth1']
    """
    nodes, host = sum(group.nodes for group in cluster.groups), cluster.groups[0].device.name.lower().startswith("cpu")
    found = []
    if host:
        found.append(Setting("OMP_NUM_THREADS", "1", "a rank is a core: threads beside it would take the other ranks' turns"))
    if nodes > 1:
        found += _between(cluster, interface, host)
    if not host:
        found.append(
            Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a collective that hangs leaves what each rank was doing, not only a timeout")
        )
        found.append(Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", "buffers that come and go (ZeRO 3) leave no gaps"))
    return tuple(found)


def _between(cluster: Cluster, interface: str, host: bool) -> list[Setting]:
    found, network = [], cluster.network
    if interface:
        why = "else gloo takes the device that the host's own name resolves to, often loopback, and nodes never meet"
        found.append(Setting("GLOO_SOCKET_IFNAME", interface, why))
    if host:
        return found
    if interface:
        found.append(Setting("NCCL_SOCKET_IFNAME", interface, "NCCL's ranks meet there; it would take the first device that is up"))
    if "ethernet" in network.name.lower():
        found.append(Setting("NCCL_IB_DISABLE", "1", f"nodes are joined by {network.name}: there is no InfiniBand to look for"))
        each = max(group.devices for group in cluster.groups)
        if network.bandwidth * each >= WIDE_ETHERNET:
            why = "one socket does not fill the wire"
            found += [Setting("NCCL_SOCKET_NTHREADS", "4", why), Setting("NCCL_NSOCKS_PERTHREAD", "4", why)]
    return found
