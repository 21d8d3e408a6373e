"""Ways to files: bytes/s of reading and writing in windows as offload does, by threads around the page cache and through it.

`python bench/offload.py [FOLDER]` prints a table; every way in turn, three rounds, the best of each counts. With `--update` it prints what a step
of training waits for files beside its update and beside what the disk alone takes: reads ahead of use hide all but the larger of the two.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.offload.scratch import Scratch, aligned

PIECE, PIECES, ROUNDS, STEPS = 2 << 20, 128, 3, 7


def by_threads(scratch: Scratch, count: int, write: bool, cached: bool = False) -> None:
    buffers = [aligned(PIECE).fill_(1) for _ in range(count)]
    call: Callable[..., Any] = os.pwritev if write else os.preadv
    handle = scratch.handle if cached else scratch._direct

    def run(which: int) -> None:
        for at in range(which, PIECES, count):
            call(handle, [buffers[which].numpy().data], at * PIECE)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(run, which) for which in range(count)]:
            done.result()


def main(folder: Path) -> None:
    scratch = Scratch(folder)
    scratch.extend(PIECE * PIECES)
    ways: dict[str, Callable[[bool], None]] = {
        f"{count} threads, direct": lambda write, n=count: by_threads(scratch, n, write) for count in (1, 2, 4)
    }  # type: ignore[misc]
    ways |= {f"{count} threads, page cache": lambda write, n=count: by_threads(scratch, n, write, cached=True) for count in (1, 4)}  # type: ignore[misc]
    print(
        f"{scratch.folder}, {PIECE * PIECES >> 20} MiB in pieces of {PIECE >> 20} MiB; direct: {scratch.is_direct}; load {os.getloadavg()[0]:.0f}"
    )
    best: dict[tuple[str, bool], tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for write in (True, False):
                began, used = time.perf_counter(), time.process_time()
                way(write)
                seconds = time.perf_counter() - began
                if seconds < best.get((name, write), (1e9, 0.0))[0]:
                    best[name, write] = seconds, time.process_time() - used
    print(f"{'way':26} {'write GB/s':>11} {'CPU s':>7} {'read GB/s':>11} {'CPU s':>7}")
    for name in ways:
        cells = [f"{PIECE * PIECES / best[name, write][0] / 1e9:11.2f} {best[name, write][1]:7.3f}" for write in (True, False)]
        print(f"{name:26} {' '.join(cells)}")


def update(folder: Path) -> None:
    """Steps of one rank with its states in memory, in files, and half in files; medians, steps of the three in turn."""
    from statistics import median

    from meshwright.models.registry import build
    from meshwright.train.trainer import parallelize

    torch.set_num_threads(1)
    sizes = {"kind": "llama", "layers": 4, "hidden": 512, "heads": 8, "ffn": 1376, "vocab": 8192, "seq": 32}
    ids = torch.arange(32).view(1, 32)
    seconds: dict[str, dict[str, list[float]]] = {}
    trainers = {}
    for plan in ("dp1", "dp1.off-optimizer-files50", "dp1.off-optimizer-files"):
        torch.manual_seed(0)
        trainers[plan] = parallelize(
            build(sizes), lambda parameters: torch.optim.AdamW(parameters, fused=True), plan, precision="bf16", offload_to=folder
        )
        trainers[plan].step({"input_ids": ids, "labels": ids})
    moved = {plan: trainer.bytes().get("offloaded", 0) for plan, trainer in trainers.items()}
    for _ in range(STEPS):
        for plan, trainer in trainers.items():
            found = seconds.setdefault(plan, {"update": [], "waited": []})
            timed = Timed(trainer.engine.zero.update)
            trainer.engine.zero.update = timed  # type: ignore[method-assign]
            waited = trainer.step({"input_ids": ids, "labels": ids}).exposed.get("offload", 0.0)
            trainer.engine.zero.update = timed.call  # type: ignore[method-assign]
            found["update"].append(timed.seconds)
            found["waited"].append(waited)
    scratch = Scratch(folder)
    scratch.extend(PIECE * PIECES)
    rates = []
    for write in (True, False):
        began = time.perf_counter()
        by_threads(scratch, 2, write)
        rates.append(PIECE * PIECES / (time.perf_counter() - began))
    in_memory = median(seconds["dp1"]["update"])
    print(f"{'plan':28} {'update s':>9} {'waited s':>9} {'disk alone s':>13} {'update in memory s':>19}")
    for plan, found in seconds.items():
        disk = moved[plan] / rates[0] + moved[plan] / rates[1]
        print(f"{plan:28} {median(found['update']):9.3f} {median(found['waited']):9.3f} {disk:13.3f} {in_memory:19.3f}")


class Timed:
    """A call on the clock."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *given: Any) -> None:
        began = time.perf_counter()
        self.call(*given)
        self.seconds = time.perf_counter() - began


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if not word.startswith("--")]
    (update if "--update" in sys.argv else main)(Path(folders[0] if folders else tempfile.gettempdir()))
