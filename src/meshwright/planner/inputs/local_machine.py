"""Describes this machine as the cluster `local`, and stores its measured profile in the user's cache.

Without a profile, `local` consists of the CUDA devices that the driver lists, or else of ranks on the CPU cores of the
host. Torch is not imported for this. There are as many CPU ranks as cores, but at least 4 and at most 8; `local:N` sets
the number to N. If there are more ranks than cores, each rank has cores / ranks of the peak, memory bandwidth and link
of a core. The memory of a rank is that of the host, or of the container, divided by the number of ranks.

`probe` and trials save a measured profile, which then replaces `local`. There is one file per machine and number of
ranks. A machine is identified by its processors, their number, its memory and its CUDA devices, so that several
machines can share a cache. With MESHWRIGHT_MEASURED=0 the profile is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.cgroup_limits import cgroup_memory_limit
from meshwright.core.codec import parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder, write_atomically
from meshwright.core.messages import Message
from meshwright.core.quantities import parse_quantity
from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup

LOCAL_PROFILE_ENV = "MESHWRIGHT_MEASURED"


def local_profile_path(ranks: int, machine: tuple[object, ...]) -> Path:
    """Returns the path of the profile of `ranks` ranks on this kind of machine."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        processor += next((line for line in lines if line.startswith("model name")), "")
    digest = hashlib.sha256(repr((processor, *machine)).encode()).hexdigest()[:12]
    return cache_folder() / "clusters" / f"{digest}-{ranks}.json"


def load_local_profile(ranks: int, machine: tuple[object, ...]) -> Cluster | None:
    """Returns the measured cluster, or None if there is none that this version can read."""
    if os.environ.get(LOCAL_PROFILE_ENV) == "0" or not (path := local_profile_path(ranks, machine)).is_file():
        return None
    with contextlib.suppress(InputError, ValueError):
        found = Cluster.model_validate(parse_text(read_text_file(path, "measured cluster"), str(path)))
        return found if found.devices == ranks else None
    return None


def save_local_profile(cluster: Cluster, machine: tuple[object, ...]) -> Path | None:
    """Saves the profile atomically. Returns its path, or None if the cache is not writable."""
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
    """Returns N of `local:N`, or None for `local`."""
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
    """Returns the default number of CPU ranks for a number of cores.

    >>> default_cpu_ranks(2), default_cpu_ranks(6), default_cpu_ranks(64)
    (4, 6, 8)
    """
    return min(max(MIN_CPU_RANKS, cores), MAX_CPU_RANKS)


def cpu_cluster(name: str, ranks: int, cores: int, memory: float) -> Cluster:
    """Returns a cluster of `ranks` CPU ranks on one host with `cores` cores and `memory` bytes.

    >>> cpu_cluster("local", 4, 2, 16e9).groups[0].device.peak["fp32"]
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


def cuda_device_names() -> list[str]:
    """Returns the names of the visible CUDA devices, in the order of the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return []
    cards = _devices_from_driver()
    if not cards and any((_DEVICE_FOLDER / control).exists() for control in ("nvidiactl", "dxg")):
        cards = _devices_from_nvidia_smi()
    return [card.name for card in (cards if visible is None else visible_devices(visible, cards))]


def visible_devices(visible: str, cards: list[CudaDevice]) -> list[CudaDevice]:
    """Returns the devices that CUDA shows for `visible`, the value of CUDA_VISIBLE_DEVICES.

    The list ends before the first item that is not a device. It is empty if an item occurs twice. An item may be a UUID
    or a prefix of a UUID. If no device has this UUID, the first device is used.

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
    """Returns the devices that the kernel driver lists. In a container, only those with a device file are visible."""
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
    """Returns the devices that nvidia-smi lists. This is used if the kernel driver provides no files."""
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
    """Returns the memory of the host in bytes, or that of the container if it is less."""
    return min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), cgroup_memory_limit())
