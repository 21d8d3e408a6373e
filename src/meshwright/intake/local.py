"""`local`: this machine. CUDA devices if the driver shows any, else ranks on the host's cores; found without importing torch.

Rule for cores: at least 4 ranks, more where there are more cores, at most 8; `local:N` says another number. Ranks beyond the cores share
them: peak, memory bandwidth and link are each the core's times cores / ranks. Memory is the host's, or the container's, over the ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from meshwright.base.codec import build
from meshwright.base.errors import InputError
from meshwright.base.limits import memory_limit
from meshwright.base.units import parse_quantity
from meshwright.catalog import read as catalog
from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup

FEWEST, MOST = 4, 8
_DRIVER = Path("/proc/driver/nvidia/gpus")
_FILES = Path("/dev")


def local_count(word: str) -> int | None:
    """N of `local:N`, None for `local`."""
    _, colon, number = word.partition(":")
    if not colon:
        return None
    if not number.isdigit() or int(number) < 1:
        raise InputError(f"cluster {word!r}: the number of ranks behind 'local:' must be at least 1, such as 'local:4'")
    return int(number)


def usual_ranks(cores: int) -> int:
    """
    >>> usual_ranks(2), usual_ranks(6), usual_ranks(64)
    (4, 6, 8)
    """
    return min(max(FEWEST, cores), MOST)


def core_cluster(name: str, ranks: int, cores: int, memory: float) -> Cluster:
    """`ranks` on one host of `cores` and `memory` bytes.

    >>> core_cluster("local", 4, 2, 16e9).groups[0].device.peak["fp32"]
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
    base = build(Link, row["link"], "device cpu.link")
    link = base.but(bandwidth=base.bandwidth * share, latency=base.latency / share)
    rate = parse_quantity(row["host_bandwidth"], "B/s") * share
    disk = parse_quantity(row["storage_bandwidth"], "B/s")
    group = NodeGroup(nodes=1, devices=ranks, device=device, link=link, host_memory=memory, host_bandwidth=rate, storage_bandwidth=disk)
    return Cluster(name=name, groups=(group,), network=build(Link, row["network"], "device cpu.network"))


def cuda_cards() -> list[str]:
    """Names of the visible CUDA devices, in the driver's order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return []
    names = _from_driver()
    if not names and any((_FILES / control).exists() for control in ("nvidiactl", "dxg")):
        names = _from_tool()
    if visible is None or not all(part.strip().isdigit() for part in visible.split(",")):
        return names
    return [names[int(part)] for part in visible.split(",") if int(part) < len(names)]


def _from_driver() -> list[str]:
    """What the kernel driver lists, of which a container sees those with a device file."""
    found: list[tuple[int, str]] = []
    for path in _DRIVER.glob("*/information"):
        text = path.read_text(errors="replace")
        model, minor = re.search(r"Model:\s*(.+)", text), re.search(r"Device Minor:\s*(\d+)", text)
        if model and minor and (_FILES / f"nvidia{minor[1]}").exists():
            found.append((int(minor[1]), model[1].strip()))
    return [name for _, name in sorted(found)]


def _from_tool() -> list[str]:
    """What nvidia-smi lists, where the kernel driver shows no files."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> float:
    """Bytes of the host, or of the container if that is less."""
    return min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), memory_limit())
