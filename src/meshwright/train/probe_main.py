"""What a supervised rank of `meshwright probe` runs: it joins the others, all measure, and rank 0 says the
`ClusterProfile`.

And what measures one device beside a run that has left it out: a moment of products of matrices.
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
    """Returns its exit status."""
    with join_process_groups(channel.rank, channel.world, timeout=120.0):
        found = measure_cluster()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    return 0


def speed(channel: RankControl, payload: IpcMessage) -> int:
    """Says the seconds of a product on the device of `slot`, by the clock on the wall; returns its exit status. It
    joins nobody."""
    torch.set_num_threads(1)
    device = init_local_device()
    size = backend_of(device).profiling.health_matmul
    left = tensor_factory(device.type)(size, size, device=device)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        began = time.perf_counter()
        float(torch.mm(left, left)[0, 0])  # asked for, so that it is done
        seconds.append(time.perf_counter() - began)
    channel.say("speed", slot=payload["slot"], seconds=median(seconds))
    return 0
