"""gloo's collectives, the all-to-all forms that runtime/comm/async_collectives.py uses on it, and shared memory: wall
and CPU milliseconds per call.

python bench/exchange.py [MiB]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.shm.memory import SHARED_MEMORY_ENV
from meshwright.spec.plan import Plan

ROUNDS = 9


def measure(rank: int, ranks: int, port: int, mebibytes: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    plan = Plan(tp=ranks)
    shared = make_parallel_context(plan)
    os.environ[SHARED_MEMORY_ENV] = "0"
    gloo = make_parallel_context(plan).world
    assert shared.shared_memory is not None and gloo is not None and shared.world is not None
    full, small = torch.zeros(mebibytes * 2**18), torch.zeros(64)
    placed = shared.shared_memory.zeros(full.numel(), torch.float32)
    shard = torch.full((full.numel() // ranks,), float(rank))
    systems: dict[str, Callable[[], object]] = {
        "256 bytes: all_reduce, gloo's": lambda: dist.all_reduce(small),
        "256 bytes: all_reduce, shared": lambda: async_collectives.all_reduce(small, shared.world).wait(),
        "all_reduce, gloo's": lambda: dist.all_reduce(full),
        "all_reduce, shared": lambda: async_collectives.all_reduce(full, shared.world).wait(),
        "all_reduce, in place": lambda: async_collectives.all_reduce(placed, shared.world).wait(),
        "reduce_scatter, gloo's": lambda: dist.reduce_scatter_tensor(shard, full),
        "reduce_scatter, all-to-all": lambda: async_collectives.reduce_scatter(full, shard, gloo).wait(),
        "reduce_scatter, in place": lambda: async_collectives.reduce_scatter(placed, shard, shared.world).wait(),
        "all_gather, gloo's": lambda: dist.all_gather_into_tensor(full, shard),
        "all_gather, all-to-all": lambda: async_collectives.all_gather(full, shard, gloo).wait(),
        "all_gather, shared": lambda: async_collectives.all_gather(full, shard, shared.world).wait(),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(ROUNDS):  # interleaved, so that a busy moment of the machine meets all alike
        for name, call in systems.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - began, time.process_time() - used))
    if rank == 0:
        print(f"{ranks} ranks, {mebibytes} MiB, median of {ROUNDS}, rank 0")
        for name, pairs in times.items():
            wall, used = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
            print(f"  {name:30s} {wall:8.2f} ms wall {used:8.2f} ms CPU")
    dist.destroy_process_group()


def main() -> None:
    mebibytes = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    for ranks, port in ((2, 29631), (4, 29632)):
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=measure, args=(rank, ranks, port, mebibytes)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
