"""The nodes of a cluster as launchers request them: sets of equal nodes, their vendor, and what each node needs of memory.

Training runs on devices that torch shows as CUDA (NVIDIA, and AMD by its ROCm build) and on CPUs. Other devices of the catalogue are there to be
planned for; a job for them is refused here, because its ranks would train on the CPUs of those machines.
Sources: the device plugins of each vendor for Kubernetes (k8s-device-plugin, k8s-device-plugin of ROCm).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.base.units import parse_quantity
from meshwright.catalog import read as catalog
from meshwright.spec.cluster import Cluster, Device, NodeGroup

RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Of the vendors whose devices are trained on, the resource that their Kubernetes device plugin offers."""

_SELECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(=[A-Za-z0-9._-]*)?")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A qualified name of a Kubernetes resource."""


class NodeSet(NamedTuple):
    """Equal nodes. `first`: the number of the first of them among all nodes. `vendor`: "cpu" for CPUs, empty where it is not known.

    `memory`: bytes of host memory that a node was asked to give; 0: nobody said. `host_memory`: bytes that it has by the cluster's description; 0: not
    known. `select`: what tells these nodes from others, in words of the launcher.
    """

    first: int
    nodes: int
    devices: int
    device: str
    vendor: str
    memory: float = 0.0
    host_memory: float = 0.0
    select: str = ""

    @property
    def accelerator(self) -> bool:
        return self.vendor != "cpu"

    @property
    def words(self) -> str:
        return f"{self.devices} x {self.device}"


@dataclass(frozen=True)
class Request:
    """What a person asks of every node. `memory`: with its unit; empty: the launcher's own rule. `select`: one for each set, joined by +."""

    memory: str = ""
    select: str = ""


def vendor_of(device: Device) -> str:
    """Returns the vendor of `device` by its name, "cpu" for a CPU, or nothing when the catalogue does not know it.

    Raises: InputError for a device that can be planned for and not trained on.
    """
    if device.name.lower().startswith("cpu"):
        return "cpu"
    word = device.name.strip().lower()
    for name, row in catalog.devices().items():
        if word in (name, *row.get("aliases", ()), *(each.lower() for each in row.get("driver_names", ()))):
            if row["vendor"] not in RESOURCES:
                raise InputError(
                    f"device {device.name!r} can be planned for and not trained on: training runs on NVIDIA and AMD GPUs and on CPUs; "
                    "name such a device in --cluster"
                )
            return str(row["vendor"])
    return ""


def node_sets(cluster: Cluster, request: Request) -> tuple[NodeSet, ...]:
    """Returns the nodes of `cluster` in order, neighbours that are equal in one set.

    Raises: InputError for devices that no job can have together, and for a request that does not fit the sets.

    >>> from meshwright.intake.clusters import read_cluster
    >>> [(each.first, each.nodes, each.words) for each in node_sets(read_cluster("2x8:h100+1x8:h100+2x4:h100"), Request())]
    [(0, 3, '8 x h100'), (3, 2, '4 x h100')]
    """
    vendors = [vendor_of(group.device) for group in cluster.groups]
    if len(set(vendors)) > 1:
        names = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        raise InputError(f"cluster {cluster.name!r} has {names}: one job cannot have devices of several vendors; launch one job for each")
    groups = _merged(cluster.groups)
    selects = _selects(request.select, [f"{group.devices} x {group.device.name}" for group in groups])
    firsts = [0, *accumulate(group.nodes for group in groups)]
    return tuple(
        NodeSet(first, group.nodes, group.devices, group.device.name, vendors[0], _memory(request.memory), group.host_memory, select)
        for first, group, select in zip(firsts, groups, selects, strict=False)
    )


def _merged(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    found: list[NodeGroup] = []
    for group in groups:
        if found and (found[-1].devices, found[-1].device.name) == (group.devices, group.device.name):
            memory = min(found[-1].host_memory, group.host_memory)
            found[-1] = group.but(nodes=found[-1].nodes + group.nodes, host_memory=memory)
        else:
            found.append(group)
    return found


def _selects(text: str, sets: list[str]) -> list[str]:
    found = text.split("+") if text else [""] * len(sets)
    for each in filter(None, found):
        if not _SELECT.fullmatch(each):
            raise InputError(f"--select {text!r}: {each!r} is neither a word nor a label KEY=VALUE; write it like h100 or gpu.product=H100")
    if len(found) != len(sets):
        raise InputError(
            f"--select {text!r}: the cluster has {len(sets)} sets of equal nodes ({', '.join(sets)}); name as many, joined by +"
        )
    return found


def check_told_apart(sets: Sequence[NodeSet]) -> None:
    """Raises: InputError where nodes have unlike devices and nothing says which nodes these are: a scheduler would give any."""
    if len({each.device for each in sets}) > 1 and not all(each.select for each in sets):
        kinds = ", ".join(each.words for each in sets)
        raise InputError(
            f"nodes of {kinds}: nothing tells the scheduler which nodes these are; name a type or a label for each, such as --select h100+a100"
        )


def _memory(text: str) -> float:
    if not text:
        return 0.0
    try:
        found = parse_quantity(text, "B")
    except ValueError as error:
        raise InputError(f"--memory: {error}") from None
    if not 2**20 <= found < 2**60:
        raise InputError(f"--memory {text!r}: must be at least 1 MiB and below 1 EiB")
    return found


def resource_name(option: str, text: str, example: str) -> str:
    """Returns `text` if it can be the name of a Kubernetes resource.

    Raises: InputError otherwise.
    """
    if len(text) > 200 or not _RESOURCE.fullmatch(text):
        raise InputError(f"{option} {text!r}: is not the name of a resource; write it like {example}")
    return text
