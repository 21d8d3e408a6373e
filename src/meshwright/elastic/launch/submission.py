"""Describes the job that a launcher starts: the sets of equal nodes, the environment variables of the ranks, and the
command of each node. The generators for torchrun, Slurm and Kubernetes use it.

Training runs on CPUs and on devices that torch exposes as CUDA: NVIDIA, and AMD with torch's ROCm build. Other devices
are in the catalogue only for planning. This module refuses a job for such devices, because its ranks would train on the
CPUs of those machines. Sources: the Kubernetes device plugins of NVIDIA (k8s-device-plugin) and AMD (k8s-device-plugin
of ROCm).

`network_settings` derives environment variables of NCCL and gloo from the links of a cluster, so that ranks use the
right network. RCCL, the library of AMD devices, reads the variables of NCCL. Each variable has a reason. If a variable
is left unset, the reason says what sets it instead.

[Note: rate without kind] The link `@ethernet-100` is Ethernet with TCP, while `@100Gb` states only a rate. For both,
variables that affect only sockets are set. NCCL_IB_DISABLE is set only for `@ethernet-100`. A link that is known only
by its rate may be InfiniBand or RoCE, and NCCL_IB_DISABLE would cost most of this rate. On any other link, NCCL uses
sockets by itself.

Sources: NCCL's documentation of its environment variables (interfaces; sockets: 4 threads with 4 sockets each, from 100
Gbit/s Ethernet on), PyTorch's page on torch.distributed (choosing the network interface).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.quantities import parse_quantity
from meshwright.elastic.launch.quoting import check_single_line, comment_line, path_argument, shell_word
from meshwright.spec.cluster import Cluster, Device, NodeGroup

DEVICE_PLUGIN_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""The Kubernetes resource name of the device plugin, by vendor. Devices of other vendors cannot train."""

_NODE_SELECTOR_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(=[A-Za-z0-9._-]*)?")
_RESOURCE_NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""The pattern of a Kubernetes resource name with a domain, such as nvidia.com/gpu."""


class NodeSet(NamedTuple):
    """A set of consecutive equal nodes. `first`: the index of its first node among all nodes. `devices`: the number of
    devices per node. `device`: their name. `vendor`: "cpu" for CPUs, '' if it is unknown.

    `memory`: the bytes of host memory per node that the user requests, or 0. `host_memory`: those in the cluster
    description, or 0 if they are unknown. `select`: the selector of these nodes in the launcher's syntax, or ''.
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
        """Returns whether the devices are accelerators."""
        return self.vendor != "cpu"

    @property
    def words(self) -> str:
        """Returns the number and the name of the devices of a node, such as "8 x h100"."""
        return f"{self.devices} x {self.device}"


@dataclass(frozen=True)
class NodeRequest:
    """The user's request for nodes. `memory`: host memory per node, a size with a unit; if it is empty, the launcher's
    default applies. `select`: a selector for each node set, joined by +, or ''."""

    memory: str = ""
    select: str = ""


def device_vendor(device: Device) -> str:
    """Returns the vendor of `device` by its name: "cpu" for a CPU, '' if the device is not in the catalogue. Raises
    InputError for a device that supports planning but not training."""
    if device.name.lower().startswith("cpu"):
        return "cpu"
    word = device.name.strip().lower()
    for name, row in catalog.devices().items():
        if word in (name, *row.get("aliases", ()), *(each.lower() for each in row.get("driver_names", ()))):
            if row["vendor"] not in DEVICE_PLUGIN_RESOURCES:
                raise InputError(
                    Message(
                        "{devices} can be planned for but not trained on: training runs on NVIDIA and AMD GPUs and on "
                        "CPUs; name one of these in --cluster",
                        devices=device.name,
                    )
                )
            return str(row["vendor"])
    return ""


def node_sets(cluster: Cluster, request: NodeRequest) -> tuple[NodeSet, ...]:
    """Returns the nodes of `cluster` in order, as sets. Consecutive nodes with equal devices are in one set. Raises
    InputError if devices are of several vendors or not supported for training, or if `request` does not match the sets.

    >>> from meshwright.planner.inputs.cluster_parser import read_cluster
    >>> sets = node_sets(read_cluster("2x8:h100+1x8:h100+2x4:h100"), NodeRequest())
    >>> [(each.first, each.nodes, each.words) for each in sets]
    [(0, 3, '8 x h100'), (3, 2, '4 x h100')]
    """
    vendors = [device_vendor(group.device) for group in cluster.groups]
    if len(set(vendors)) > 1:
        names = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        raise InputError(
            Message(
                "cluster {cluster!r} has {names}: one job cannot have devices of several vendors; launch one job for "
                "each",
                cluster=cluster.name,
                names=names,
            )
        )
    groups = _merge_equal_sets(cluster.groups)
    selects = _node_selectors(request.select, [f"{group.devices} x {group.device.name}" for group in groups])
    firsts = [0, *accumulate(group.nodes for group in groups)]
    return tuple(
        NodeSet(
            first,
            group.nodes,
            group.devices,
            group.device.name,
            vendors[0],
            _parse_memory(request.memory),
            group.host_memory,
            select,
        )
        for first, group, select in zip(firsts, groups, selects, strict=False)
    )


def _merge_equal_sets(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    found: list[NodeGroup] = []
    for group in groups:
        if found and (found[-1].devices, found[-1].device.name) == (group.devices, group.device.name):
            memory = min(found[-1].host_memory, group.host_memory)
            found[-1] = group.but(nodes=found[-1].nodes + group.nodes, host_memory=memory)
        else:
            found.append(group)
    return found


def _node_selectors(text: str, sets: list[str]) -> list[str]:
    found = text.split("+") if text else [""] * len(sets)
    for each in filter(None, found):
        if not _NODE_SELECTOR_PATTERN.fullmatch(each):
            raise InputError(
                Message(
                    "--select {text!r}: {each!r} is neither a name nor a label KEY=VALUE; examples: h100, "
                    "gpu.product=H100",
                    text=text,
                    each=each,
                )
            )
    if len(found) != len(sets):
        raise InputError(
            Message(
                "--select {text!r}: the cluster has {count} sets of equal nodes ({sets}); give one selector for each "
                "set, joined by +",
                text=text,
                count=len(sets),
                sets=", ".join(sets),
            )
        )
    return found


def check_distinguishable(sets: Sequence[NodeSet]) -> None:
    """Raises InputError if nodes have different devices but no selectors: the scheduler could not distinguish them."""
    if len({each.device for each in sets}) > 1 and not all(each.select for each in sets):
        kinds = ", ".join(each.words for each in sets)
        raise InputError(
            Message(
                "the job has nodes of {kinds}, which the scheduler cannot distinguish: name a type or a label for "
                "each, such as --select h100+a100",
                kinds=kinds,
            )
        )


def _parse_memory(text: str) -> float:
    if not text:
        return 0.0
    try:
        found = parse_quantity(text, "B")
    except ValueError as error:
        raise InputError(Message("--memory: {error}", error=error)) from None
    if not 2**20 <= found < 2**60:
        raise InputError(Message("--memory {text!r} must be at least 1 MiB and below 1 EiB", text=text))
    return found


def check_resource_name(option: str, text: str, example: str) -> str:
    """Returns `text`, the value of the command-line option `option`. Raises InputError if it cannot be the name of a
    Kubernetes resource. `example`: a valid name for the error message."""
    if len(text) > 200 or not _RESOURCE_NAME_PATTERN.fullmatch(text):
        raise InputError(
            Message(
                "{option} {text!r} is not a valid resource name; example: {example}",
                option=option,
                text=text,
                example=example,
            )
        )
    return text


_INTERFACE_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")
FAST_ETHERNET_BYTES_PER_SECOND = 10e9
"""If the network bandwidth of a node is at least this, one socket cannot saturate its Ethernet link."""


class EnvironmentSetting(NamedTuple):
    """An environment variable, its value and the reason for the value. If the value is '', the variable is left unset,
    and the reason says what sets it instead."""

    name: str
    value: str
    reason: str

    @property
    def line(self) -> str:
        """Returns the setting as a line of a shell script: an `export`, or a comment if it has no value."""
        if not self.value:
            return comment_line(f"{self.name}: {self.reason}")
        return f"export {self.name}={shell_word(self.value)}  {comment_line(self.reason)}"


def network_settings(cluster: Cluster, interface: str = "") -> tuple[EnvironmentSetting, ...]:
    """Returns the environment variables of the ranks of `cluster`. `interface`: the name of the network interface
    between nodes (`ip route get ADDRESS` prints it), or ''. Raises InputError if it is not a valid name.

    >>> from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
    >>> device = Device(name="cpu", memory=1e9, bandwidth=1e9, peak={"fp32": 1e9})
    >>> node = NodeGroup(nodes=2, devices=8, device=device, link=Link(name="memory", bandwidth=1e9))
    >>> pair = Cluster(name="pair", groups=(node,), network=Link(name="Ethernet", bandwidth=1e9))
    >>> [f"{it.name}={it.value}" for it in network_settings(pair, "eth1")]
    ['OMP_NUM_THREADS=1', 'GLOO_SOCKET_IFNAME=eth1']
    """
    if interface and not _INTERFACE_PATTERN.fullmatch(interface):
        raise InputError(
            Message(
                "--interface {interface!r} is not the name of one network interface; example: eth0 (`ip route get "
                "ADDRESS` shows it)",
                interface=interface,
            )
        )
    nodes, host = sum(group.nodes for group in cluster.groups), cluster.groups[0].device.name.lower().startswith("cpu")
    found = []
    if host:
        found.append(
            EnvironmentSetting(
                "OMP_NUM_THREADS", "1", "each rank has one core: more threads would take CPU time from other ranks"
            )
        )
    if nodes > 1:
        found += _inter_node_links(cluster, interface, host)
    if not host:
        found.append(
            EnvironmentSetting(
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "1",
                "a collective that hangs leaves what each rank was doing, not only a timeout",
            )
        )
        found.append(
            EnvironmentSetting(
                "PYTORCH_ALLOC_CONF", "expandable_segments:True", "buffers that come and go (ZeRO 3) leave no gaps"
            )
        )
    return tuple(found)


def _inter_node_links(cluster: Cluster, interface: str, host: bool) -> list[EnvironmentSetting]:
    found, network = [], cluster.network
    by_node = "unset: each node uses the interface of its route to the first node; --interface NAME sets another"
    why = "else gloo takes the device that the host's own name resolves to, often loopback, and nodes never meet"
    found.append(EnvironmentSetting("GLOO_SOCKET_IFNAME", interface, why if interface else by_node))
    if host:
        return found
    library = "RCCL" if device_vendor(cluster.groups[0].device) == "amd" else "NCCL"
    why = f"{library} uses exactly this interface (=); without it, {library} uses the first interface that is up"
    found.append(EnvironmentSetting("NCCL_SOCKET_IFNAME", interface and f"={interface}", why if interface else by_node))
    ethernet, rate = "ethernet" in network.name.lower(), is_rate_name(network.name)
    if ethernet:
        found.append(
            EnvironmentSetting(
                "NCCL_IB_DISABLE", "1", f"nodes are joined by {network.name}: there is no InfiniBand to look for"
            )
        )
    else:
        why = f"left to {library}: {network.name} is a rate, and " if rate else f"left to {library}: "
        found.append(
            EnvironmentSetting(
                "NCCL_IB_DISABLE", "", f"{why}where there is neither InfiniBand nor RoCE it takes sockets by itself"
            )
        )
    if ethernet or rate:
        each = max(group.devices for group in cluster.groups)
        if network.bandwidth * each >= FAST_ETHERNET_BYTES_PER_SECOND:
            why = "one socket does not fill the wire"
            found += [
                EnvironmentSetting("NCCL_SOCKET_NTHREADS", "4", why),
                EnvironmentSetting("NCCL_NSOCKS_PERTHREAD", "4", why),
            ]
    why = "which chooses rings, trees or switches for each size of a message from the links that it finds"
    found.append(EnvironmentSetting("NCCL_ALGO", "", f"left to {library}, {why}"))
    return found


def is_rate_name(link: str) -> bool:
    """Returns whether the name of a link states only its rate and not its type ([Note: rate without kind]).

    >>> [is_rate_name(name) for name in ("100Gb", "4x200Gb", "25GB/s", "25", "ethernet-100", "ib-ndr")]
    [True, True, True, True, False, False]
    """
    speed = re.sub(r"^[0-9.]+x", "", link)
    try:
        return parse_quantity(speed, "B/s") > 0
    except ValueError:
        return speed.replace(".", "", 1).isdecimal()


JOB_FILE = "job.json"
DEFAULT_PORT = 29400
NODE_RANK_COMMAND = 'exec env "RANK=$(({first} + {number}))" "$@"'
"""The shell command of a node, for a launcher that numbers the nodes of each set from 0. It sets RANK to the index of
the node among all nodes, and executes its arguments."""


@dataclass(frozen=True)
class JobSubmission:
    """The description of a run for a launcher. `sets`: its nodes. `min_nodes`: the run continues with at least this
    number of nodes. `folder`: the run folder, under an equal path on every node. `grace`: the seconds from a stop
    request to the end of the run, for the last save.

    `settings`: the environment variables with their reasons, including unset ones. `about`: lines that describe the
    job. Raises InputError if `min_nodes` does not fit the nodes, or if `folder` has several lines.
    """

    name: str
    sets: tuple[NodeSet, ...]
    min_nodes: int
    folder: str
    grace: float
    settings: tuple[EnvironmentSetting, ...] = ()
    about: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_single_line("run.folder", self.folder)
        if not 1 <= self.min_nodes <= self.nodes:
            raise InputError(
                Message(
                    "--min-nodes {min_nodes}: the job has {nodes} nodes; it may go on with 1 to {nodes}",
                    min_nodes=self.min_nodes,
                    nodes=self.nodes,
                )
            )
        if self.min_nodes < self.nodes and len(self.sets) > 1:
            kinds = ", ".join(each.words for each in self.sets)
            raise InputError(
                Message(
                    "--min-nodes {min_nodes}: the job has nodes of {kinds}, but only equal nodes can replace each "
                    "other",
                    min_nodes=self.min_nodes,
                    kinds=kinds,
                )
            )

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return sum(each.nodes for each in self.sets)

    @property
    def is_several(self) -> bool:
        """Returns whether there are several nodes. A single node needs no launcher: `meshwright train` starts its
        ranks."""
        return self.nodes > 1

    @property
    def label(self) -> str:
        """Returns the run's name in a form that is valid as a host name: at most 40 lower-case letters, digits and
        dashes.

        >>> JobSubmission("Llama_7B v2", (NodeSet(0, 2, 8, "h100", "nvidia"),), 1, "runs/x", 30.0).label
        'llama-7b-v2'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "run"

    def command(self, job: str) -> list[str]:
        """Returns the words of the command that each node runs. `job`: the path of the job file. A run folder without a
        slash gets the prefix ./, because `meshwright train` would otherwise place it under runs/."""
        folder = self.folder if "/" in self.folder else f"./{self.folder}"
        return ["meshwright", "train", path_argument(job), "--folder", path_argument(folder), *self.ranks]

    @property
    def ranks(self) -> list[str]:
        """Returns the command-line option for the minimum number of ranks, or no words if all nodes are required."""
        return (
            ["--set", f"run.min_ranks={self.min_nodes * self.sets[0].devices}"] if self.min_nodes < self.nodes else []
        )

    def comments(self) -> list[str]:
        """Returns the lines of `about` as comment lines."""
        return [comment_line(each) for each in self.about]

    def reasons(self) -> list[str]:
        """Returns comment lines with the settings and their reasons, for formats without comments at the settings."""
        return [comment_line(f"{it.name}{it.value and '=' + it.value}: {it.reason}") for it in self.settings]

    def exports(self) -> list[str]:
        """Returns the lines of a shell script that export the settings."""
        return [setting.line for setting in self.settings]
