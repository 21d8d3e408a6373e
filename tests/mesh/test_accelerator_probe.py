"""What `meshwright probe` measures on accelerators, without one: tables of the driver are text, and a CPU is warmed."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from meshwright.runtime.backend import Backend, CpuBackend, DeviceProperties
from meshwright.runtime.profiler import interconnect
from meshwright.runtime.profiler.device import measure_warm_layer
from meshwright.runtime.profiler.interconnect import find_connections, name_connections, read_topology

LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n  NV#  = a bonded set of # NVLinks\n"


def table(paths: list[list[str]], cards: int) -> str:
    """As `nvidia-smi topo -m` prints it, with escapes for the underlined header."""
    names = [f"GPU{n}" for n in range(len(paths) - cards)] + [f"NIC{n}" for n in range(cards)]
    header = "\t" + "\t".join(f"\x1b[4m{name}" for name in names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    rows = [f"{name}\t" + "\t".join(row) + "\t0-47,96-143\t0\tN/A" for name, row in zip(names, paths, strict=True)]
    return "\n".join([header, *rows, LEGEND, "NIC Legend:\n\n  NIC0: mlx5_0\n"])


def uniform(devices: int, path: str) -> list[list[str]]:
    return [[" X " if one == other else path for other in range(devices)] for one in range(devices)]


@pytest.mark.parametrize(
    ("devices", "path", "kind"),
    [(8, "NV18", "nvswitch"), (8, "NV12", "nvswitch"), (16, "NV6", "nvswitch"), (4, "NV4", "nvlink"),
     (4, "NV6", "nvlink"), (2, "NV12", "nvlink"), (4, "PIX", "pcie"), (8, "SYS", "pcie"), (2, "NODE", "pcie")],
)  # fmt: skip
def test_nvswitch_nvlink_and_pcie_are_told_from_each_other(devices: int, path: str, kind: str) -> None:
    found = name_connections(read_topology(table(uniform(devices, path), 0)))
    pairs = {(f"GPU{one}", f"GPU{other}") for one, other in permutations(range(devices), 2)}
    assert found == dict.fromkeys(pairs, kind)


def test_bridges_between_pairs_and_network_cards_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices of which two and two have a bridge, and a card near the first pair."""
    paths = [
        [" X ", "NV12", "SYS", "SYS", "PIX"],
        ["NV12", " X ", "SYS", "SYS", "PXB"],
        ["SYS", "SYS", " X ", "NV12", "SYS"],
        ["SYS", "SYS", "NV12", " X ", "SYS"],
        ["PIX", "PXB", "SYS", "SYS", " X "],
    ]
    identities = "".join(f"{index}, GPU-id-{index}\n" for index in range(4))
    monkeypatch.setattr(interconnect, "PEER_MEMORY_MODULES", (tmp_path,))
    found = [find_connections(f"id-{index}", identities, table(paths, 1)) for index in range(4)]
    assert found[0].kinds == {"id-1": "nvlink", "id-2": "pcie", "id-3": "pcie"}
    assert [each.gpudirect for each in found] == [True, True, False, False]
    monkeypatch.setattr(interconnect, "PEER_MEMORY_MODULES", (tmp_path / "absent",))
    assert not find_connections("id-0", identities, table(paths, 1)).gpudirect
    for own, known, paths_text in (("id-9", identities, ""), ("id-0", "", table(paths, 1)), ("id-0", identities, "")):
        unknown = find_connections(own, known, paths_text)
        assert not unknown.kinds and not unknown.gpudirect


def test_a_device_is_warm_before_its_rate_clock_and_power_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    device, backend = torch.device("cpu"), Backend.by_type["cpu"]
    assert measure_warm_layer(device) == (0.0, 0.0, 0.0)
    monkeypatch.setattr(CpuBackend, "profiling", replace(backend.profiling, warm_seconds=0.3))
    noted = DeviceProperties("warm", clock=2e9, power=65.0)
    monkeypatch.setattr(CpuBackend, "properties", lambda backend, device: noted)
    began = time.perf_counter()
    rate, clock, power = measure_warm_layer(device)
    assert time.perf_counter() - began >= 0.3
    assert rate > 1e6 and (clock, power) == (2e9, 65.0)


def test_accelerators_are_measured_with_messages_beyond_256_mib_and_warm_for_three_seconds() -> None:
    sizes = Backend.by_type["cuda"].profiling
    assert max(sizes.collectives) > 2**28 and sizes.max_message > 2**28 and sizes.warm_seconds >= 3.0
