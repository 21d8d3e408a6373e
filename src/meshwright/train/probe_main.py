"""The functions that ranks run for `meshwright probe`. `probe` joins the process group and measures the cluster; rank 0
reports the `ClusterProfile`.

`speed` times matrix products on a device that a training run has excluded.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from meshwright.core.ipc import IpcMessage
from meshwright.runtime.backend import backend_of
from meshwright.runtime.device import init_local_device
from meshwright.runtime.profiler.device import measure_cluster, tensor_factory
from meshwright.train.rank_main import RankControl, join_process_groups

MATMUL_REPEATS = 15


def probe(channel: RankControl, payload: IpcMessage) -> int:
    """Measures the cluster and returns the exit status."""
    with join_process_groups(channel.rank, channel.world, timeout=120.0):
        found = measure_cluster()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    return 0


def speed(channel: RankControl, payload: IpcMessage) -> int:
    """Reports the median wall-clock seconds of a matrix product on the device with index `slot`. It joins no process
    group. Returns the exit status."""
    torch.set_num_threads(1)
    device = init_local_device()
    size = backend_of(device).profiling.health_matmul
    left = tensor_factory(device.type)(size, size, device=device)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        began = time.perf_counter()
        float(torch.mm(left, left)[0, 0])  # reading the result waits until the product has ended
        seconds.append(time.perf_counter() - began)
    channel.say("speed", slot=payload["slot"], seconds=median(seconds))
    return 0
