"""Ways to files: bytes/s of reading and writing in windows as offload does, by threads around the page cache and through it.

`python bench/offload.py [FOLDER]` prints a table; every way in turn, three rounds, the best of each counts.
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

from meshwright.parallel.offload.scratch import Scratch, aligned

PIECE, PIECES, ROUNDS = 2 << 20, 128, 3


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


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()))
