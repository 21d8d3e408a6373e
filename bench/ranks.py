"""Ranks for a benchmark: processes forked from this one, which has torch imported and warm, with one gloo group over
loopback.

Guarantee: results in order of rank, or the first failing rank's traceback; no process outlives the call.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel


def warm() -> None:
    """What every rank would else pay for at its first step, and count as its memory: lazy imports, ours and theirs."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()
    import meshwright.train.trainer  # noqa: F401

    if importlib.util.find_spec("transformers"):
        import transformers.models.llama.modeling_llama  # noqa: F401


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 900.0) -> list[Any]:
    """`function(*arguments)` on `world` ranks. Raises RuntimeError with a rank's traceback when one fails."""
    warm()
    gc.freeze()  # else a rank's first full collection would write to every object that it shares with the others
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        pipes, processes = [], []
        port = free_port()
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world, folder, port, theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], end: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} did not answer in time")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                good, value = pipe.recv()
            except EOFError:
                processes[rank].join(1)
                good, value = False, f"died with exit code {processes[rank].exitcode}"
            if not good:
                raise RuntimeError(f"rank {rank}: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    rank: int, world: int, folder: str, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))
        pipe.send((True, function(*arguments)))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
