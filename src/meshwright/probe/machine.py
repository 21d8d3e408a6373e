"""The machine as all ranks find it together: every device beside all others, then the links."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.device import host_identity, machine_identity
from meshwright.parallel.mesh import make_mesh
from meshwright.probe.device import measure_device, quota
from meshwright.probe.network import Network
from meshwright.spec.measurement import Measurement
from meshwright.spec.plan import Plan


def measure() -> Measurement:
    """All ranks of the default process group, or this process alone, measured. All of them call it; the answer is that of rank 0."""
    began, ours, all_before = time.perf_counter(), time.process_time(), busy_seconds()
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_num_threads(1)
    mesh = make_mesh(Plan(dp_replicate=world))
    hosts = _everyone(host_identity(), world)
    device = measure_device(mesh.rank, mesh.device, hosts.count(host_identity()))
    if mesh.device.type == "cpu":
        device = device.but(memory=device.host_memory / hosts.count(device.host))
    found = Measurement(devices=tuple(_everyone(device, world)))
    if world > 1:
        network = Network(mesh, found.hosts, quota=min(1.0, quota()), share=device.share)
        found = found.but(pairs=tuple(network.pairs()), timings=tuple(network.timings()), meetings=tuple(network.meetings()))
    seconds = time.perf_counter() - began
    spent = _everyone((time.process_time() - ours, machine_identity()), world)  # hosts that are emulated lie on one machine
    here = [seconds for seconds, machine in spent if machine == machine_identity()]
    others = (busy_seconds() - all_before - sum(here)) / seconds
    return found.but(seconds=seconds, busy=max(others, 0.0) if all_before else 0.0)


def _everyone(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


def busy_seconds() -> float:
    """Seconds that all processors of this machine have worked since it started; 0 where nobody counts them."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")
