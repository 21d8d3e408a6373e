"""Parses `--cluster`: `local`, a file, a catalog name, or node groups `NODESxDEVICES:device[@LINK]`. Groups of
different nodes are joined by `+`.

Examples: `8x8:a100-80gb`, `2x8:a100-80gb+4x8:v100-32gb`, `4x8:h100@ib-ndr`. LINK is the network between nodes. LINK may
follow any group and applies to all groups. LINK is a catalog name, the bandwidth of one device (`@25GB/s`, `@200Gb`,
`@100Mb`), or the number and rate of a node's ports (`@4x200Gb`). Heterogeneous nodes communicate at the speed of the
slowest network.

The cluster `local` is this machine: its CUDA devices as the driver lists them, or else ranks on the CPU cores of the
host. Torch is not imported to find them. There are as many CPU ranks as cores, but at least 4 and at most 8; `local:N`
sets the number to N. If there are more ranks than cores, each rank has cores / ranks times the peak rate, memory
bandwidth and link bandwidth of a core. The memory of a CPU rank is the memory of the host, or of the container, divided
by the number of ranks.

`probe` and trials measure this machine and save a profile in the user's cache. If there is a saved profile, `local`
means this profile instead of the description above. There is one profile for each machine and number of ranks. A
machine is identified by its processor type, number of processors, memory and CUDA devices, so that several machines can
share a cache. If the environment variable MESHWRIGHT_MEASURED is 0, the profile is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.cgroup_limits import cgroup_memory_limit
from meshwright.core.codec import parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.files import cache_folder, path_from_text, write_atomically
from meshwright.core.messages import Message
from meshwright.core.quantities import parse_quantity
from meshwright.spec.cluster import MAX_CLUSTER_NODES, Cluster, Device, Link, NodeGroup

_GROUP_PATTERN = re.compile(r"(?:([0-9]{1,9})x)?([0-9]{1,9}):([A-Za-z0-9_.+-]+)")
_PORTS_PATTERN = re.compile(r"([0-9]{1,9})x(.+)")
_DEFAULT_LATENCY = "6 us"
DEVICE_FIELDS = (
    "name",
    "power_watts",
    "memory",
    "bandwidth",
    "peak",
    "efficiency",
    "sustained",
    "attention",
    "processors",
    "context",
    "source",
)


def read_cluster(text: str, measured: bool = True) -> Cluster:
    """Returns the cluster that `text` describes. `measured`: whether to use this machine's saved profile for `local`
    and `local:N`, if there is one.

    Raises: InputError if `text` is none of the forms in the module docstring, or names an unknown device.

    >>> read_cluster("2x8:a100-80gb+1x8:v100-32gb").devices
    24
    """
    word = text.strip()
    if word == "local" or word.startswith("local:"):
        found = local_cluster(word)
        profile = load_local_profile(found.devices, _machine_key()) if measured else None
        return found if profile is None else profile.but(name=word)
    named = catalog.clusters().get(word.lower())
    if named is not None:
        return parse_cluster(named["is"]).but(name=word)
    path = path_from_text(word)
    if path.suffix in (".json", ".yaml", ".yml") or path.is_file():
        return read_cluster_file(path)
    return parse_cluster(word)


def save_local_cluster(cluster: Cluster) -> Path | None:
    """Saves `cluster` as the measured profile of this machine. Returns the path, or None if the cache is not
    writable."""
    return save_local_profile(cluster, _machine_key())


def _machine_key() -> tuple[object, ...]:
    return (available_cpus(), round(host_memory_bytes() / 2**28), *cuda_device_names())


def local_cluster(word: str) -> Cluster:
    """Returns this machine as a cluster: its CUDA devices, or ranks on its CPU cores. `word` is `local` or `local:N`.
    Raises InputError if the machine has fewer than N CUDA devices, devices of several types, or devices that are not in
    the catalog."""
    count, cards = parse_local_count(word), cuda_device_names()
    if not cards:
        return cpu_cluster(word, count or default_cpu_ranks(available_cpus()), available_cpus(), host_memory_bytes())
    if count is not None and count > len(cards):
        raise InputError(
            Message(
                "cluster {word!r}: this machine has only {count} CUDA devices ({cards}); set CUDA_VISIBLE_DEVICES= "
                "(empty) for {count_2} ranks on CPU cores",
                word=word,
                count=len(cards),
                cards=cards[0],
                count_2=count,
            )
        )
    if len(set(cards)) > 1:
        raise InputError(
            Message(
                "cluster {word!r}: heterogeneous devices, {cards}; choose identical ones with CUDA_VISIBLE_DEVICES",
                word=word,
                cards=", ".join(cards),
            )
        )
    row = next((row for row in catalog.devices().values() if cards[0] in row.get("driver_names", ())), None)
    if row is None:
        raise InputError(
            Message(
                "cluster {word!r}: the device {cards!r} is not in the catalog; name a similar device, such as "
                "--cluster 1x{count}:a100-80gb, or describe the device in a file, --cluster cluster.yaml",
                word=word,
                cards=cards[0],
                count=len(cards),
            )
        )
    return parse_cluster(f"1x{count or len(cards)}:{row['name']}").but(name=word)


def read_cluster_file(path: Path) -> Cluster:
    """Returns the cluster that a YAML or JSON file describes."""
    return cluster_from_data(parse_text(read_text_file(path, "cluster"), str(path)), str(path))


def cluster_from_data(data: Any, where: str) -> Cluster:
    """Converts the data of a cluster file to a `Cluster`. A device may be given by its name in the catalog. `where` is
    the location for error messages.

    Raises: InputError if the data is not a valid cluster.
    """
    if isinstance(data, dict):
        if data.get("network") is None and data.keys() <= Cluster.model_fields.keys():
            raise InputError(
                Message(
                    "{where}: the link between nodes is missing: set `network`, such as {{name: ib, bandwidth: 25 "
                    "GB/s, latency: 5 us}}",
                    where=where,
                )
            )
        data = (
            {**data, "groups": list(map(_fill_group, data["groups"]))}
            if isinstance(data.get("groups"), list | tuple)
            else data
        )
    return validate_data(Cluster, data, where)


def _fill_group(group: Any) -> Any:
    """Completes a node group whose device is a catalog name. The catalog provides the device, and those fields of the
    group's links and host that are missing."""
    if not (isinstance(group, dict) and isinstance(group.get("device"), str)):
        return group
    row = device_entry(group["device"])
    count = group.get("devices", 1)
    return {
        **_node_group(row, 1, count if isinstance(count, int) and 0 < count <= MAX_CLUSTER_NODES else 1).model_dump(),
        "nodes": 1,
        **group,
        "device": _device_spec(row),
    }


def parse_cluster(text: str) -> Cluster:
    """Parses groups of nodes joined by `+`, with an optional `@LINK`. Raises InputError if a part is not
    NODESxDEVICES:device."""
    body, link = _split_network(text)
    groups, networks = [], []
    for part in re.split(r"\+(?=\d+[x:])", body):
        match = _GROUP_PATTERN.fullmatch(part.strip())
        if match is None:
            raise InputError(
                Message(
                    "cluster {text!r}: {part!r} is not NODESxDEVICES:device; write it like '8x8:a100-80gb', or "
                    "'local', or a file",
                    text=text,
                    part=part,
                )
            )
        nodes, devices = int(match[1] or 1), int(match[2])
        if nodes < 1 or devices < 1:
            raise InputError(
                Message(
                    "cluster {text!r}: {part!r} has {nodes} nodes of {devices} devices; both must be at least 1",
                    text=text,
                    part=part,
                    nodes=nodes,
                    devices=devices,
                )
            )
        row = device_entry(match[3])
        groups.append(_node_group(row, nodes, devices))
        networks.append(validate_data(Link, row["network"], f"device {row['name']}.network"))
    network = (
        parse_link(link, min(group.devices for group in groups))
        if link
        else min(networks, key=lambda network: network.bandwidth)
    )
    return validate_data(Cluster, {"name": text, "groups": tuple(groups), "network": network}, f"cluster {text!r}")


def _split_network(text: str) -> tuple[str, str]:
    """Splits `text` into the node groups and LINK, which is '' if `text` has none. Raises InputError if `text` has two
    different links."""
    found = re.findall(r"@([^+]+)", text)
    if len(set(found)) > 1:
        raise InputError(
            Message(
                "cluster {text!r} names two networks, {found!r} and {found_2!r}, but all nodes use one network",
                text=text,
                found=found[0],
                found_2=found[1],
            )
        )
    return re.sub(r"@[^+]+", "", text), found[0].strip() if found else ""


def parse_link(text: str, devices: int) -> Link:
    """Parses LINK. The bandwidth of the result is that of one device; the `devices` devices of a node share the node's
    ports. Raises InputError if `text` is neither a name of the catalog nor a rate above 0.

    >>> [round(parse_link(text, 8).bandwidth / 1e9, 3) for text in ("25GB/s", "25", "200Gb", "4x200Gb", "800 Mb/s")]
    [25.0, 25.0, 25.0, 12.5, 0.1]
    """
    row = catalog.find_entry(catalog.links(), text)
    if row is not None:
        return validate_data(Link, {key: value for key, value in row.items() if key != "source"}, f"link {text}")
    match = _PORTS_PATTERN.fullmatch(text)
    part, speed = (float(match[1]) / devices, match[2]) if match else (1.0, text)
    try:
        rate = float(speed) * 1e9 if speed.replace(".", "", 1).isdecimal() else parse_quantity(speed, "B/s")
    except ValueError:
        known = list(catalog.links())
        raise InputError(
            Message(
                "link {text!r} is neither a rate such as '200Gb' or '25GB/s' nor one of {known}{hint}",
                text=text,
                known=", ".join(known),
                hint=did_you_mean(text, known),
            )
        ) from None
    if rate * part <= 0:
        raise InputError(Message("link {text!r} carries nothing: its rate must be above 0", text=text))
    return validate_data(Link, {"name": text, "bandwidth": rate * part, "latency": _DEFAULT_LATENCY}, f"link {text!r}")


def device_entry(name: str) -> catalog.CatalogEntry:
    """Returns the catalog entry of the device `name`. Raises InputError for an unknown name; the message suggests
    similar names."""
    rows = catalog.devices()
    row = catalog.find_entry(rows, name)
    if row is None:
        hint = did_you_mean(name.lower(), catalog.all_names(rows)) or Message(
            "; `meshwright catalog devices` lists the known ones"
        )
        raise InputError(Message("device {name!r} is not in the catalog{hint}", name=name, hint=hint))
    return row


def _device_spec(row: catalog.CatalogEntry) -> Device:
    return validate_data(
        Device, {key: row[key] for key in DEVICE_FIELDS if key in row}, Message("device {name}", name=row["name"])
    )


def _node_group(row: catalog.CatalogEntry, nodes: int, devices: int) -> NodeGroup:
    sharing = min(1.0, row.get("host_links", devices) / devices)
    fields = {
        "nodes": nodes,
        "devices": devices,
        "device": _device_spec(row),
        "link": validate_data(Link, row["link"], f"device {row['name']}.link"),
        "host_memory": parse_quantity(row["host_memory"], "B") * devices,
        "host_bandwidth": parse_quantity(row["host_bandwidth"], "B/s") * sharing,
        "storage_bandwidth": parse_quantity(row.get("storage_bandwidth", 0), "B/s"),
    }
    return validate_data(NodeGroup, fields, f"nodes of {row['name']}")


LOCAL_PROFILE_ENV = "MESHWRIGHT_MEASURED"


def local_profile_path(ranks: int, machine: tuple[object, ...]) -> Path:
    """Returns the path of the profile for `ranks` ranks on this machine. `machine` is the result of `_machine_key`;
    this function adds the processor type."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith("model name")), "")
    digest = hashlib.sha256(repr((processor, *machine)).encode()).hexdigest()[:12]
    return cache_folder() / "clusters" / f"{digest}-{ranks}.json"


def load_local_profile(ranks: int, machine: tuple[object, ...]) -> Cluster | None:
    """Returns the saved profile of `ranks` ranks on this machine. Returns None if there is no profile, or if this
    version cannot read the profile."""
    if os.environ.get(LOCAL_PROFILE_ENV) == "0" or not (path := local_profile_path(ranks, machine)).is_file():
        return None
    with contextlib.suppress(InputError, ValueError):
        found = Cluster.model_validate(parse_text(read_text_file(path, "measured cluster"), str(path)))
        return found if found.devices == ranks else None
    return None


def save_local_profile(cluster: Cluster, machine: tuple[object, ...]) -> Path | None:
    """Saves the profile `cluster` atomically. Returns the path of the file, or None if the cache is not writable."""
    path = local_profile_path(cluster.devices, machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, cluster.to_json() + "\n")
    except OSError:
        return None
    return path


MIN_CPU_RANKS, MAX_CPU_RANKS = 4, 8
_NVIDIA_PROC_FOLDER = Path("/proc/driver/nvidia/gpus")
_DEVICE_FOLDER = Path("/dev")


def parse_local_count(word: str) -> int | None:
    """Returns N of `local:N`, or None for `local`. Raises InputError if N is not a number above 0."""
    _, colon, number = word.partition(":")
    if not colon:
        return None
    if not number.isdigit() or int(number) < 1:
        raise InputError(
            Message(
                "cluster {word!r}: the number of ranks after 'local:' must be at least 1, such as 'local:4'", word=word
            )
        )
    return int(number)


def default_cpu_ranks(cores: int) -> int:
    """Returns the default number of CPU ranks on a machine with `cores` cores.

    >>> default_cpu_ranks(2), default_cpu_ranks(6), default_cpu_ranks(64)
    (4, 6, 8)
    """
    return min(max(MIN_CPU_RANKS, cores), MAX_CPU_RANKS)


def cpu_cluster(name: str, ranks: int, cores: int, memory: float) -> Cluster:
    """Returns a cluster of `ranks` CPU ranks on one host with `cores` cores and `memory` bytes. Its rates are those of
    the catalog device `cpu`; with more ranks than cores, each rank has cores / ranks of these rates.

    >>> cpu_cluster("local", 4, 2, 16e9).groups[0].device.peak["fp32"]  # half of 80 GFLOP/s, the rate of a core
    40000000000.0
    """
    row = catalog.devices()["cpu"]
    share = min(1.0, cores / ranks)
    device = Device(
        name="cpu",
        memory=memory / ranks,
        bandwidth=parse_quantity(row["bandwidth"], "B/s") * share,
        peak={kind: parse_quantity(rate, "FLOP/s") * share for kind, rate in row["peak"].items()},
        efficiency=row["efficiency"],
        sustained=row["sustained"],
        share=share,
        source=row["source"],
    )
    base = validate_data(Link, row["link"], "device cpu.link")
    link = base.but(bandwidth=base.bandwidth * share, latency=base.latency / share)
    rate = parse_quantity(row["host_bandwidth"], "B/s") * share
    disk = parse_quantity(row["storage_bandwidth"], "B/s")
    group = NodeGroup(
        nodes=1,
        devices=ranks,
        device=device,
        link=link,
        host_memory=memory,
        host_bandwidth=rate,
        storage_bandwidth=disk,
    )
    return Cluster(name=name, groups=(group,), network=validate_data(Link, row["network"], "device cpu.network"))


class CudaDevice(NamedTuple):
    """A CUDA device as the driver lists it. `uuid` is empty if the driver does not report it."""

    name: str
    uuid: str = ""


def cuda_device_names(all_devices: bool = False) -> list[str]:
    """Returns the names of the visible CUDA devices, in the order of the driver. `all_devices`: those that
    CUDA_VISIBLE_DEVICES hides too."""
    visible = None if all_devices else os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return []
    cards = _devices_from_driver()
    if not cards and any((_DEVICE_FOLDER / control).exists() for control in ("nvidiactl", "dxg")):
        cards = _devices_from_nvidia_smi()
    return [card.name for card in (cards if visible is None else visible_devices(visible, cards))]


def visible_devices(visible: str, cards: list[CudaDevice]) -> list[CudaDevice]:
    """Returns the devices in `cards` that CUDA makes visible if CUDA_VISIBLE_DEVICES is `visible`.

    An item of `visible` is an index, a UUID, or a prefix of a UUID. A UUID that no device has selects the first device.
    Any other item that is not a device is ignored, and so are all items after it. If an item occurs twice, the result
    is empty.

    >>> [card.name for card in visible_devices("1,0,-1,2", [CudaDevice("a"), CudaDevice("b"), CudaDevice("c")])]
    ['b', 'a']
    >>> (visible_devices("-1", [CudaDevice("a")]), visible_devices("NoDevFiles", [CudaDevice("a")]),
    ...     visible_devices("0,0", [CudaDevice("a")]))
    ([], [], [])
    >>> devices = [CudaDevice("a"), CudaDevice("b", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")]
    >>> [card.name for card in visible_devices("GPU-8932f937,MIG-1c2d3e4f", devices)]
    ['b', 'a']
    """
    found: dict[str, CudaDevice] = {}
    for word in (part.strip() for part in visible.split(",") if cards):
        if word in found:
            return []
        if word.startswith(("GPU-", "MIG-")):
            found[word] = next((card for card in cards if card.uuid.startswith(word)), cards[0])
        elif word.isdigit() and int(word) < len(cards):
            found[word] = cards[int(word)]
        else:
            break
    return [*found.values()]


def _devices_from_driver() -> list[CudaDevice]:
    """Returns the devices that the kernel driver lists and that have a device file. (A container cannot use a device
    without a device file.)"""
    found: list[tuple[int, CudaDevice]] = []
    for path in _NVIDIA_PROC_FOLDER.glob("*/information"):
        text = path.read_text(errors="replace")
        model, minor, uuid = (
            re.search(rf"{field}:[ \t]*(.+)", text) for field in ("Model", "Device Minor", "GPU UUID")
        )
        if model and minor and (_DEVICE_FOLDER / f"nvidia{minor[1].strip()}").exists():
            found.append((int(minor[1]), CudaDevice(model[1].strip(), uuid[1].strip() if uuid else "")))
    return [card for _, card in sorted(found)]


def _devices_from_nvidia_smi() -> list[CudaDevice]:
    """Returns the devices that nvidia-smi lists, or none if it fails. This function is called only if the kernel driver
    lists no devices."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.rpartition(",") for line in listed.stdout.splitlines() if line.strip())
    return [CudaDevice(name.strip(), uuid.strip()) for name, _, uuid in rows]


def available_cpus() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> float:
    """Returns the memory of the host in bytes, or the memory limit of the container if this is lower."""
    return min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), cgroup_memory_limit())
