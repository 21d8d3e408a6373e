"""`local`: this machine. CUDA devices if the driver shows any, else ranks on the host's cores; found without importing torch.

Rule for cores: at least 4 ranks, more where there are more cores, at most 8; `local:N` says another number. Ranks beyond the cores share
them: peak, memory bandwidth and link are each the core's times cores / ranks. Memory is the host's, or the container's, over the ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

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


class Card(NamedTuple):
    """A CUDA device as the driver lists it; `uuid` is empty where it does not say one."""

    name: str
    uuid: str = ""


def cuda_cards() -> list[str]:
    """Names of the visible CUDA devices, in the driver's order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return []
    cards = _from_driver()
    if not cards and any((_FILES / control).exists() for control in ("nvidiactl", "dxg")):
        cards = _from_tool()
    return [card.name for card in (cards if visible is None else chosen(visible, cards))]


def chosen(visible: str, cards: list[Card]) -> list[Card]:
    """Those that CUDA shows for this CUDA_VISIBLE_DEVICES: one after the other up to the first word that is none of them, and none at all
    where one stands twice. A UUID, or the beginning of one, is one device: the one that the driver lists under it, else one like the first.

    >>> [card.name for card in chosen("1,0,-1,2", [Card("a"), Card("b"), Card("c")])]
    ['b', 'a']
    >>> chosen("-1", [Card("a")]), chosen("NoDevFiles", [Card("a")]), chosen("0,0", [Card("a")])
    ([], [], [])
    >>> [card.name for card in chosen("GPU-8932f937,MIG-1c2d3e4f", [Card("a"), Card("b", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")])]
    ['b', 'a']
    """
    found: dict[str, Card] = {}
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


def _from_driver() -> list[Card]:
    """What the kernel driver lists, of which a container sees those with a device file."""
    found: list[tuple[int, Card]] = []
    for path in _DRIVER.glob("*/information"):
        text = path.read_text(errors="replace")
        model, minor, uuid = (re.search(rf"{field}:[ \t]*(.+)", text) for field in ("Model", "Device Minor", "GPU UUID"))
        if model and minor and (_FILES / f"nvidia{minor[1].strip()}").exists():
            found.append((int(minor[1]), Card(model[1].strip(), uuid[1].strip() if uuid else "")))
    return [card for _, card in sorted(found)]


def _from_tool() -> list[Card]:
    """What nvidia-smi lists, where the kernel driver shows no files."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.rpartition(",") for line in listed.stdout.splitlines() if line.strip())
    return [Card(name.strip(), uuid.strip()) for name, _, uuid in rows]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> float:
    """Bytes of the host, or of the container if that is less."""
    return min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), memory_limit())
