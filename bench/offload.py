"""What waiting in files costs: the disk's rates as offload uses it, what a step waits beside its update and the disk
alone, a run within a third of its states.

`python -m bench offload [FOLDER]`, the folder on the disk that is meant. Ways to files: every way in turn, three
rounds, the best of each counts.
Updates: steps of three plans and the disk alone in turn, medians; reads ahead of use hide all but the larger of what
the update and what the disk takes. The limit is a
control group's (Linux, root); its table is left out where none can be made. A link to a device is played: each copy
takes as long as it would there.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch

from bench.peers import machine, write
from meshwright.planner.cost.overlap import concurrent_seconds
from meshwright.runtime.offload.copy_streams import CopyEvent, CopyStreams
from meshwright.runtime.offload.swap_file import SwapFile, page_aligned_buffer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ranks"))
import memory_limit

PIECE, PIECES, ROUNDS, STEPS = 2 << 20, 128, 3, 7
TIMES = (0.25, 0.5, 1.0, 2.0)
"""Of an update on the host: what each way over a link takes by itself."""
MIB = 2**20
PLANS = ("dp1", "dp1.off-optimizer-disk50", "dp1.off-optimizer-disk")
SIZES = {"kind": "llama", "layers": 4, "hidden": 512, "heads": 8, "ffn": 1376, "vocab": 8192, "seq": 32}


def by_threads(scratch: SwapFile, count: int, write: bool, cached: bool = False) -> None:
    buffers = [page_aligned_buffer(PIECE).fill_(1) for _ in range(count)]
    call: Callable[..., Any] = os.pwritev if write else os.preadv
    handle = scratch.handle if cached else scratch._direct

    def run(which: int) -> None:
        for at in range(which, PIECES, count):
            call(handle, [buffers[which].numpy().data], at * PIECE)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(run, which) for which in range(count)]:
            done.result()


def ways(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """Seconds, wall and processor, of writing and reading all pieces by each way, and whether this disk lets the page
    cache be gone around."""
    scratch = SwapFile(folder)
    scratch.extend(PIECE * PIECES)
    known: dict[str, Callable[[bool], None]] = {
        f"{count} thread{'s' if count > 1 else ''}, {'page cache' if cached else 'direct'}": (
            lambda write, count=count, cached=cached: by_threads(scratch, count, write, cached)  # type: ignore[misc]
        )
        for cached, counts in ((False, (1, 2, 4)), (True, (1, 4)))
        for count in counts
    }
    best: dict[tuple[str, bool], tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for name, way in known.items():
            for writes in (True, False):
                began, used = time.perf_counter(), time.process_time()
                way(writes)
                taken = time.perf_counter() - began, time.process_time() - used
                best[name, writes] = min(best.get((name, writes), taken), taken)
    return [{"way": name, "write": best[name, True], "read": best[name, False]} for name in known], scratch.is_direct


def update(folder: Path) -> list[dict[str, Any]]:
    """Steps of one rank with its states in memory, half in files, and in files: seconds of the update, those waited for
    files, and those that the
    disk takes by itself to read and write as much."""
    from meshwright.models.registry import build_reference_model
    from meshwright.train.trainer import parallelize

    torch.set_num_threads(1)
    ids = torch.arange(32).view(1, 32)
    batch = {"input_ids": ids, "labels": ids}
    seconds: dict[str, dict[str, list[float]]] = {plan: {"update": [], "waited": []} for plan in PLANS}
    trainers = {}
    for plan in PLANS:
        torch.manual_seed(0)
        trainers[plan] = parallelize(
            build_reference_model(SIZES),
            lambda parameters: torch.optim.AdamW(parameters, fused=True),
            plan,
            precision="bf16",
            offload_to=folder,
        )
        trainers[plan].step(batch)
    rates: list[tuple[float, float]] = []
    for _ in range(STEPS):
        rates.append(alone(folder))
        for plan, trainer in trainers.items():
            timed = Timed(trainer.engine.updater.step)
            trainer.engine.updater.step = timed  # type: ignore[method-assign]
            waited = trainer.step(batch).exposed.get("offload", 0.0)
            trainer.engine.updater.step = timed.call  # type: ignore[method-assign]
            seconds[plan]["update"].append(timed.seconds)
            seconds[plan]["waited"].append(waited)
    writing, reading = (median(each) for each in zip(*rates, strict=True))
    rows = []
    for plan, trainer in trainers.items():
        moved = trainer.bytes().get("offloaded", 0)
        update, waited = (median(seconds[plan][what]) for what in ("update", "waited"))
        rows.append(
            {
                "plan": plan,
                "moved": moved,
                "update": update,
                "waited": waited,
                "disk": moved / writing + moved / reading,
            }
        )
    return rows


def alone(folder: Path) -> tuple[float, float]:
    """Bytes/s of writing and of reading by two threads, as offload does, each once, with nothing beside."""
    scratch = SwapFile(folder)
    scratch.extend(PIECE * PIECES)
    rates = []
    for writes in (True, False):
        began = time.perf_counter()
        by_threads(scratch, 2, writes)
        rates.append(PIECE * PIECES / (time.perf_counter() - began))
    return rates[0], rates[1]


class Timed:
    """A call on the clock."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *given: Any) -> None:
        began = time.perf_counter()
        self.call(*given)
        self.seconds = time.perf_counter() - began


class Paced(CopyStreams):
    """Copies between the host and itself, one behind the other in each direction, each as long as one over a link of
    `rate` bytes/s."""

    def __init__(self, rate: float) -> None:
        super().__init__(torch.device("cpu"))
        self.rate, self.weights = rate, set[int]()
        self._free = {True: 0.0, False: 0.0}
        self._lock = Lock()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        up = into.untyped_storage().data_ptr() in self.weights
        with self._lock:
            self._free[up] = lands = (
                max(self._free[up], time.perf_counter()) + source.numel() * source.element_size() / self.rate
            )
        landing = super().copy(into, source)
        time.sleep(max(lands - time.perf_counter(), 0.0))
        return landing


def over_a_link() -> list[dict[str, Any]]:
    """Seconds of updates on the host whose gradients come down and whose weights go up at the rates of a link, of which
    each way by itself takes a
    part, or several times, of the update with a link that takes no time."""
    from meshwright.models.registry import build_reference_model
    from meshwright.runtime.build import parallelize as build_context
    from meshwright.runtime.offload.swapper import StateSwapper, make_state_swapper
    from meshwright.train import trainer as training

    def played(*given: Any) -> StateSwapper | None:
        away = make_state_swapper(*given)
        assert away is not None
        away.has_device_memory, away.copy_streams = True, paced
        return away

    torch.set_num_threads(1)
    ids, paced = torch.arange(32).view(1, 32), Paced(math.inf)
    torch.manual_seed(0)
    build_context.make_state_swapper = played  # type: ignore[attr-defined]
    try:
        made = training.parallelize(
            build_reference_model(SIZES),
            lambda parameters: torch.optim.AdamW(parameters, fused=True),
            "dp1.off-optimizer",
            precision="bf16",
        )
    finally:
        build_context.make_state_swapper = make_state_swapper  # type: ignore[attr-defined]
    zero, updater = made.engine.zero, made.engine.updater
    paced.weights |= {unit.weights.full.untyped_storage().data_ptr() for unit in zero.trainable}
    each_way = sum(unit.gradients.shard.numel() * unit.gradients.shard.element_size() for unit in zero.trainable)
    made.step({"input_ids": ids, "labels": ids})

    def updated(way: float) -> float:
        paced.rate, timed = each_way / way if way else math.inf, Timed(type(updater).step.__get__(updater))
        updater.step = timed  # type: ignore[method-assign]
        made.step({"input_ids": ids, "labels": ids})
        return timed.seconds

    alone = min(updated(0.0) for _ in range(STEPS))
    ways = [times * alone for times in (0.0, *TIMES)]
    taken = [[updated(way) for way in ways] for _ in range(ROUNDS * STEPS)]
    return [{"way": way, "update": min(each)} for way, each in zip(ways, zip(*taken, strict=True), strict=True)]


def within_a_limit(folder: Path) -> list[dict[str, Any]]:
    """Three steps of a model within a third of what its states take, kept in memory and kept in files; none where no
    limit can be set."""
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes

    if memory_limit.place() is None:
        return []
    states = model_spec("llama", ArchitectureSizes(**memory_limit.LARGE)).parameters * memory_limit.STATES
    rows = []
    for plan in ("dp1", "dp1.off-optimizer-disk"):
        began = time.perf_counter()
        found = memory_limit.train(plan, str(folder), states // memory_limit.TIMES)
        row = {
            "plan": plan,
            "limit": states // memory_limit.TIMES,
            "states": states,
            "seconds": time.perf_counter() - began,
        }
        rows.append({**row, "ended": found} if isinstance(found, dict) else {**row, "ended": found.returncode})
    return rows


def of_ways(rows: list[dict[str, Any]]) -> str:
    lines = ["| way | write GB/s | CPU s | read GB/s | CPU s |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{PIECE * PIECES / row[what][0] / 1e9:.2f} | {row[what][1]:.3f}" for what in ("write", "read")]
        lines.append(f"| {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_updates(rows: list[dict[str, Any]]) -> str:
    memory = rows[0]["update"]
    lines = [
        "| plan | MiB in files | update s | of it waited for files | the disk alone, read and write | the larger of "
        "disk and update in memory | update over that |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bound = max(memory, row["disk"])
        lines.append(
            f"| {row['plan']} | {row['moved'] / MIB:.0f} | {row['update']:.3f} | {row['waited']:.3f} | "
            f"{row['disk']:.3f} | {bound:.3f} | {row['update'] / bound:.2f} |"
        )
    return "\n".join(lines)


def of_link(rows: list[dict[str, Any]]) -> str:
    alone = rows[0]["update"]
    lines = [
        "| each way by itself s | update s | the longest of the three s | their sum s | as priced s | update over "
        "that |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        way, update, priced = row["way"], row["update"], concurrent_seconds(alone, row["way"], row["way"])
        lines.append(
            f"| {way:.3f} | {update:.3f} | {max(way, alone):.3f} | {2 * way + alone:.3f} | {priced:.3f} | "
            f"{update / priced:.2f} |"
        )
    return "\n".join(lines)


def of_limit(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| plan | states MiB | limit MiB | how it ended | step s | of it waited for files | whole run s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ended = row["ended"]
        if isinstance(ended, dict):
            said = (
                f"three steps, losses {', '.join(f'{loss:.4f}' for loss in ended['losses'])} | "
                f"{ended['seconds']:.1f} | {ended['waited']:.1f}"
            )
        else:
            said = ("the system killed it" if ended == -9 else f"exit code {ended}") + " | |"
        lines.append(
            f"| {row['plan']} | {row['states'] / MIB:.0f} | {row['limit'] / MIB:.0f} | {said} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is meant"
    )
    parser.add_argument("--ways", action="store_true", help="ways to files alone")
    parser.add_argument("--update", action="store_true", help="updates alone")
    parser.add_argument("--link", action="store_true", help="updates beside a link alone")
    parser.add_argument("--limit", action="store_true", help="the run within a limit of memory alone")
    parser.add_argument("--out", default="offload", help="name of the files in bench/results, or - for none")
    given = parser.parse_args(arguments)
    every = not (given.ways or given.update or given.link or given.limit)
    report: dict[str, Any] = {
        "machine": machine(),
        "workload": {"piece MiB": PIECE >> 20, "pieces": PIECES, **SIZES},
        "tables": {},
    }
    texts: list[str] = []

    def add(title: str, text: str, rows: list[dict[str, Any]]) -> None:
        report["tables"][title] = rows
        texts.append(f"### {title}\n\n{text}")
        print(texts[-1] + "\n", flush=True)

    if every or given.ways:
        found, direct = ways(given.folder)
        report["workload"]["around the page cache"] = direct
        add("Ways to files", of_ways(found), found)
    if every or given.update:
        found = update(given.folder)
        add("Updates in bf16 with AdamW", of_updates(found), found)
    if every or given.link:
        found = over_a_link()
        add("Updates on the host beside a link to a device", of_link(found), found)
    if every or given.limit:
        found = within_a_limit(given.folder)
        add(
            "States three times the memory limit",
            of_limit(found) if found else "No control group can be made here: it needs root.",
            found,
        )
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if every and given.out != "-":
        note = (
            f"Ways: the best of {ROUNDS} rounds. Updates: medians of {STEPS} steps; beside a link the best of "
            f"{ROUNDS * STEPS}. The limit counts the page cache too."
        )
        write(given.out, "Offload to files", report, texts, note)


if __name__ == "__main__":
    sys.exit(main())
