"""What a launcher sets so that ranks find each other over the right network: variables of NCCL and gloo from a cluster's links, each with its
reason; and what it leaves to whom, with the reason too.

[Note: a rate is no kind] `@ethernet-100` says that nodes are joined by Ethernet with TCP, `@100Gb` how much goes through. What only a socket reads
is set for both. NCCL_IB_DISABLE is set for the former alone: where a wire is InfiniBand or RoCE after all, it would cost most of its rate, and
where there is neither, NCCL finds none and takes sockets by itself.

Sources: NCCL's documentation of its environment variables (interfaces; sockets: 4 threads of 4 sockets from 100 Gbit/s Ethernet on), PyTorch's
page on torch.distributed (choosing the network interface).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.base.units import parse_quantity
from meshwright.launch.quoting import comment, shell_word
from meshwright.spec.cluster import Cluster

_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")
WIDE_ETHERNET = 10e9
"""Bytes/s of a node's Ethernet from which one socket does not fill it."""


class Setting(NamedTuple):
    """An environment variable, its value and why; without a value it is left to whom the reason names."""

    name: str
    value: str
    reason: str

    @property
    def line(self) -> str:
        """Of a shell script."""
        if not self.value:
            return comment(f"{self.name}: {self.reason}")
        return f"export {self.name}={shell_word(self.value)}  {comment(self.reason)}"


def settings_of(cluster: Cluster, interface: str = "") -> tuple[Setting, ...]:
    """Of the ranks of `cluster`. `interface`: the network device between nodes, where its name is known (`ip route get ADDRESS` says it).

    >>> from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
    >>> node = NodeGroup(nodes=2, devices=8, device=Device(name="cpu", memory=1e9, bandwidth=1e9, peak={"fp32": 1e9}), link=Link(name="memory", bandwidth=1e9))
    >>> [f"{it.name}={it.value}" for it in settings_of(Cluster(name="pair", groups=(node,), network=Link(name="Ethernet", bandwidth=1e9)), "eth1")]
    ['OMP_NUM_THREADS=1', 'GLOO_SOCKET_IFNAME=eth1']
    """
    if interface and not _DEVICE.fullmatch(interface):
        raise InputError(f"--interface {interface!r}: is the name of one network device, such as eth0 (`ip route get ADDRESS` says it)")
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
    by_node = "left to each node, which takes the network device of its route to the one that leads; --interface NAME sets another"
    why = "else gloo takes the device that the host's own name resolves to, often loopback, and nodes never meet"
    found.append(Setting("GLOO_SOCKET_IFNAME", interface, why if interface else by_node))
    if host:
        return found
    why = "NCCL's ranks meet there, and nowhere else (=); it would take the first device that is up"
    found.append(Setting("NCCL_SOCKET_IFNAME", interface and f"={interface}", why if interface else by_node))
    ethernet, rate = "ethernet" in network.name.lower(), is_rate(network.name)
    if ethernet:
        found.append(Setting("NCCL_IB_DISABLE", "1", f"nodes are joined by {network.name}: there is no InfiniBand to look for"))
    else:
        why = f"left to NCCL: {network.name} is a rate, and " if rate else "left to NCCL: "
        found.append(Setting("NCCL_IB_DISABLE", "", f"{why}where there is neither InfiniBand nor RoCE it takes sockets by itself"))
    if ethernet or rate:
        each = max(group.devices for group in cluster.groups)
        if network.bandwidth * each >= WIDE_ETHERNET:
            why = "one socket does not fill the wire"
            found += [Setting("NCCL_SOCKET_NTHREADS", "4", why), Setting("NCCL_NSOCKS_PERTHREAD", "4", why)]
    why = "left to NCCL, which chooses rings, trees or switches for each size of a message from the links that it finds"
    found.append(Setting("NCCL_ALGO", "", why))
    return found


def is_rate(link: str) -> bool:
    """Whether a link is named by what goes through it, and not by what it is.

    >>> [is_rate(name) for name in ("100Gb", "4x200Gb", "25GB/s", "25", "ethernet-100", "ib-ndr")]
    [True, True, True, True, False, False]
    """
    speed = re.sub(r"^[0-9.]+x", "", link)
    try:
        return parse_quantity(speed, "B/s") > 0
    except ValueError:
        return speed.replace(".", "", 1).isdecimal()
