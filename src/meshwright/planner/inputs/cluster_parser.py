"""Reads `--cluster`: `local`, a file, a catalog name, or a cluster in words (cluster_syntax.py).

The cluster `local` is this machine: its CUDA devices as the driver lists them, or else ranks on the CPU cores of the
host. Torch is not imported to find them. There are as many CPU ranks as cores, but at most 8; commands let the planner
choose fewer (planner/search/local_ranks.py). `local:N`
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
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder, path_from_text, write_atomically
from meshwright.core.messages import Message
from meshwright.core.quantities import parse_quantity
from meshwright.planner.inputs.cluster_syntax import device_entry, device_spec, node_group, parse_cluster
from meshwright.spec.cluster import MAX_CLUSTER_NODES, Cluster, Device, Link, NodeGroup


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
    cluster = validate_data(Cluster, data, where)
    _check_spans(cluster, where)
    return cluster


def _check_spans(cluster: Cluster, where: str) -> None:
    """Raises InputError unless each tier of the network connects several equal blocks of the tier inside of it."""
    inside = max(group.devices for group in cluster.groups)
    for at, link in enumerate((cluster.network, *cluster.tiers)[:-1]):
        if not link.span or link.span % inside or (link.span == inside and at) or cluster.devices % link.span:
            raise InputError(
                Message(
                    "{where}: {link} has span {span}, but a network inside of another one must state how many "
                    "consecutive devices it connects: a multiple of {inside} that divides the {devices} devices",
                    where=where,
                    link=link.name,
                    span=link.span,
                    inside=inside,
                    devices=cluster.devices,
                )
            )
        inside = link.span


def _fill_group(group: Any) -> Any:
    """Completes a node group whose device is a catalog name. The catalog provides the device, and those fields of the
    group's links and host that are missing."""
    if not (isinstance(group, dict) and isinstance(group.get("device"), str)):
        return group
    row = device_entry(group["device"])
    count = group.get("devices", 1)
    return {
        **node_group(row, 1, count if isinstance(count, int) and 0 < count <= MAX_CLUSTER_NODES else 1).model_dump(),
        "nodes": 1,
        **group,
        "device": device_spec(row),
    }


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
    (2, 6, 8)
    """
    return min(cores, MAX_CPU_RANKS)


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
