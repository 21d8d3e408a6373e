"""Reads from the NVIDIA driver how the devices of a host are connected: NVSwitch, NVLink or PCIe.

`nvidia-smi topo -m` prints a table with one row and one column for each device. `NV18` means 18 NVLink links between
two devices. PIX, PXB, PHB, NODE and SYS are paths over PCIe. With NVSwitch, all links of a device go to switches, so
the device has all of its links to every other device. Without it, a device divides its links among the others. So the
devices are behind NVSwitch if the links of one device, summed over the others, exceed the links of any device.

Source: NVIDIA Fabric Manager user guide; `nvidia-smi topo -m`, legend.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.runtime.backend import backend_of

TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
IDENTITY_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
COMMAND_TIMEOUT_SECONDS = 20.0

MAX_NVLINK_LINKS = 18
"""The most NVLink links of a device: 18 of H100, H200 and B200, 12 of A100, 6 of V100."""

PEER_MEMORY_MODULES = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
SAME_SWITCH = ("PIX", "PXB")
"""Paths over PCIe switches alone, on which network cards read device memory at full speed (GPUDirect)."""


def read_topology(table: str) -> dict[tuple[str, str], str]:
    """Returns the path between each two devices and network cards of a table of `nvidia-smi topo -m`, by their names in
    the table.

    >>> table = " GPU0 GPU1 NIC0 CPU Affinity\\nGPU0 X NV12 PIX 0-7\\nGPU1 NV12 X SYS 0-7"
    >>> read_topology(table)["GPU0", "GPU1"]
    'NV12'
    """
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line).split() for line in table.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"]), [])
    names = [name for name in header if re.fullmatch(r"(GPU|NIC|mlx5_)\d+", name)]
    rows = [line for line in lines if line and line[0] in names and line is not header]
    return {(row[0], name): path for row in rows for name, path in zip(names, row[1:], strict=False) if path != "X"}


def name_connections(paths: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Returns the kind of connection of each two devices: nvswitch, nvlink or pcie. `paths`: a result of
    `read_topology`."""
    between = {pair: path for pair, path in paths.items() if all(name.startswith("GPU") for name in pair)}
    links = {pair: int(path[2:]) if re.fullmatch(r"NV\d+", path) else 0 for pair, path in between.items()}
    totals: dict[str, int] = {}
    for (one, _), count in links.items():
        totals[one] = totals.get(one, 0) + count
    return {
        pair: "pcie" if not count else "nvswitch" if totals[pair[0]] > MAX_NVLINK_LINKS else "nvlink"
        for pair, count in links.items()
    }


class DeviceConnections(NamedTuple):
    """The unique ID of a device, '' if the driver does not report it. `kinds`: the kind of its connection to each other
    device of its host, by the unique ID of that device. `gpudirect`: whether network cards read its memory directly."""

    uuid: str = ""
    kinds: Mapping[str, str] = {}
    gpudirect: bool = False


def own_connections(device: torch.device) -> DeviceConnections:
    """Returns the connections of `device`. Network cards read its memory directly (GPUDirect) if the driver's module
    for it is loaded and a card is behind the same PCIe switch."""
    backend = backend_of(device)
    own = backend.properties(device).uuid if backend.has_streams else ""
    return find_connections(own, _output(IDENTITY_COMMAND), _output(TOPOLOGY_COMMAND)) if own else DeviceConnections()


def find_connections(own: str, identities: str, topology: str) -> DeviceConnections:
    """Returns the connections of the device with the unique ID `own`, from what IDENTITY_COMMAND and TOPOLOGY_COMMAND
    print."""
    rows = (line.split(", ") for line in identities.splitlines() if ", " in line)
    names = {f"GPU{index}": uuid.strip().removeprefix("GPU-") for index, uuid in rows}
    mine = next((name for name, uuid in names.items() if uuid == own.removeprefix("GPU-")), "")
    if not mine:
        return DeviceConnections()
    paths = read_topology(topology)
    kinds = {names[other]: kind for (one, other), kind in name_connections(paths).items() if one == mine}
    near = any(
        one == mine and not other.startswith("GPU") and path in SAME_SWITCH for (one, other), path in paths.items()
    )
    return DeviceConnections(names[mine], kinds, near and any(module.exists() for module in PEER_MEMORY_MODULES))


def _output(command: tuple[str, ...]) -> str:
    """Returns what `command` prints, '' if it is not installed or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout
