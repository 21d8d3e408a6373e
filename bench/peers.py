"""Ours and its peers on the reference workload, interleaved step by step in one job of forked ranks.

In each round every system does one step on the round's batch, in random order, the same on all ranks, after a barrier.
Wall time is that
of the slowest rank, CPU time the sum over ranks; both are divided by those of DDP in the same round, so that load from
outside cancels as
far as it can. Peak memory is measured in jobs of their own, one system each: the growth of the process's share of
memory over what it held
before its model, looked at every few milliseconds. Losses are compared with one process, step by step.

Peers that torch does not bring are measured where they are installed, and named in one line where they are not.
DeepSpeed leaves torch as it
is with `DS_BUILD_OPS=0 pip install --no-deps deepspeed` and, beside it, hjson, einops, msgpack, ninja, py-cpuinfo.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import run
from bench.systems import DDP, OTHERS, Batch, Setting, Sizes, Step, System, divided, is_here, replicated, sharded

RESULTS = Path(__file__).parent / "results"
FAMILIES: dict[str, Callable[[int, int], list[System]]] = {
    "replicated": replicated,
    "sharded": sharded,
    "divided": divided,
}
REFERENCE = DDP.name
NOTE = (
    "{rounds} rounds after {warm} to warm up; medians with quartiles. Losses are compared with one process, or with "
    "DDP where that did not run. A peak is the growth of a rank's proportional share of memory over what the process "
    "held before its model, at 8 tokens a sequence."
)
SAMPLE = 0.004  # seconds between two looks at the memory
ROOM = 700 * 2**20  # bytes that a system may take on a rank: 16 a parameter, its activations, its buffers


def batch_of(sizes: Sizes, index: int) -> Batch:
    """The global batch of a round, the same on every rank."""
    ids = torch.randint(
        sizes.vocab, (sizes.batch, sizes.sequence), generator=torch.Generator().manual_seed(1000 + index)
    )
    return {"input_ids": ids, "labels": ids}


def chosen_systems(family: str, world: int, batch: int, only: list[str]) -> list[System]:
    """Those of `family` with one of the words `only` in their names; DDP always."""
    return [
        system
        for system in FAMILIES[family](world, batch)
        if not only or system is DDP or any(word in system.name for word in only)
    ]


def measure(setting: Setting, family: str, only: list[str], rounds: int, warm: int) -> dict[str, list[dict[str, Any]]]:
    """On every rank: `double_buffered` of the systems of a family."""
    systems = chosen_systems(family, setting.world, setting.sizes.batch, only)
    return in_turn({system.name: system.make(setting) for system in systems}, setting.sizes, rounds, warm)


def in_turn(steps: dict[str, Step], sizes: Sizes, rounds: int, warm: int) -> dict[str, list[dict[str, Any]]]:
    """On every rank: the rounds of each of `steps` as {seconds, cpu, loss}; whole after the sums over ranks."""
    order = random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    for index in range(warm + rounds):
        batch = batch_of(sizes, index)
        for name in order.sample(sorted(steps), len(steps)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss, weight = steps[name](batch)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            slowest = torch.tensor(wall, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            sums = torch.tensor([cpu, loss * weight, weight], dtype=torch.float64)
            dist.all_reduce(sums)
            found[name].append(
                {
                    "seconds": float(slowest),
                    "cpu": float(sums[0]),
                    "loss": float(sums[1] / sums[2]),
                    "warm": index < warm,
                }
            )
    return found


def peak(setting: Setting, family: str, name: str) -> float:
    """On every rank: bytes by which one system's memory grew at most; the batch is tiny, so that model state
    decides."""
    before = _proportional()
    largest, through = [before], threading.Event()

    def watch() -> None:
        while not through.wait(SAMPLE):
            largest[0] = max(largest[0], _proportional())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        step = next(
            system
            for system in chosen_systems(family, setting.world, setting.sizes.batch, [name])
            if system.name == name
        ).make(setting)
        for index in range(3):
            step(batch_of(setting.sizes, index))
    finally:
        through.set()
        watcher.join()
    return largest[0] - before


def fresh(world: int, setting: Setting, family: str, name: str) -> float:
    """`peak` of the fullest of ranks forked from a process that has just started: what a long one left behind moved the
    figure by 50 MiB."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_fullest, world, setting, family, name).result()


def _fullest(world: int, setting: Setting, family: str, name: str) -> float:
    chosen_systems(family, world, setting.sizes.batch, [name])  # what they import is no memory of a rank's
    return max(run(world, peak, setting, family, name))


def _proportional() -> float:
    """Bytes of this process, those that several share divided among them: resident memory would count a shared buffer
    once for each."""
    line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return float(line.split()[1]) * 1024


def spread(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def rows(found: dict[str, list[dict[str, Any]]], peaks: dict[str, float], tokens: int) -> list[dict[str, Any]]:
    """One row a system: ratios to DDP of the same round, losses against one process (or DDP where that did not run)."""
    truth = found.get("one process", found[REFERENCE])
    table = []
    for name, steps in found.items():
        pairs = [(mine, base) for mine, base in zip(steps, found[REFERENCE], strict=True) if not mine["warm"]]
        table.append(
            {
                "system": name,
                "wall_ratio": spread([mine["seconds"] / base["seconds"] for mine, base in pairs]),
                "cpu_ratio": spread([mine["cpu"] / base["cpu"] for mine, base in pairs]),
                "seconds": spread([mine["seconds"] for mine, _ in pairs]),
                "cpu_seconds": spread([mine["cpu"] for mine, _ in pairs]),
                "tokens_per_second": tokens / spread([mine["seconds"] for mine, _ in pairs])[1],
                "loss_error": max(
                    abs(mine["loss"] - other["loss"]) / abs(other["loss"])
                    for mine, other in zip(steps, truth, strict=True)
                ),
                "first_loss": steps[0]["loss"],
                "last_loss": steps[-1]["loss"],
                "peak_bytes": peaks.get(name),
            }
        )
    return table


def paired(found: dict[str, list[dict[str, Any]]], systems: list[System]) -> list[dict[str, Any]]:
    """Ours against the one that does the same: how many times as fast, round by round."""
    table = []
    for name, rival in (
        (system.name, rival) for system in systems for rival in system.rivals if system.name in found and rival in found
    ):
        pairs = [(mine, other) for mine, other in zip(found[name], found[rival], strict=True) if not mine["warm"]]
        table.append(
            {
                "system": name,
                "rival": rival,
                "speed": spread([other["seconds"] / mine["seconds"] for mine, other in pairs]),
                "cpu": spread([other["cpu"] / mine["cpu"] for mine, other in pairs]),
            }
        )
    return table


def markdown(title: str, table: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> str:
    lines = [
        f"### {title}",
        "",
        "| system | wall / DDP [quartiles] | CPU / DDP [quartiles] | wall s | CPU s | tokens/s | largest loss error "
        "| peak MiB a rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        low, wall, high = row["wall_ratio"]
        less, cpu, more = row["cpu_ratio"]
        memory = f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else ""
        lines.append(
            f"| {row['system']} | {wall:.2f} [{low:.2f}, {high:.2f}] | {cpu:.2f} [{less:.2f}, {more:.2f}] | "
            f"{row['seconds'][1]:.2f} | {row['cpu_seconds'][1]:.2f} | {row['tokens_per_second']:.0f} | "
            f"{row['loss_error']:.1e} | {memory} |"
        )
    for row in pairs:
        (low, speed, high), (less, cpu, more) = row["speed"], row["cpu"]
        lines.append(
            f"\n{row['system']} against {row['rival']}: {speed:.2f} times as fast [{low:.2f}, {high:.2f}], "
            f"its CPU time {cpu:.2f} times ours [{less:.2f}, {more:.2f}]"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What a reader must know to read the figures."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def check_room(needed: float) -> None:
    """All systems of a job are in memory at once; without room the figures would be those of the disk."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    free = float(line.split()[1]) * 1024
    if free < needed:
        sys.exit(
            f"bench.peers: the job takes up to {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; name "
            "fewer systems with --only"
        )


def default_source() -> str:
    import importlib.util

    return "huggingface" if importlib.util.find_spec("transformers") else "own"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of systems; DDP always runs")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--source", choices=["huggingface", "own"], default=default_source())
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW in every system")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="peak memory alone, which other programs do not disturb; prints, writes nothing",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model: to see that everything runs")
    parser.add_argument("--out", default="peers", help="name of the files in bench/results, or - for none")
    chosen = parser.parse_args(arguments)
    sizes = Sizes(layers=4, hidden=64, heads=4, ffn=128, vocab=512, sequence=32) if chosen.small else Sizes()
    setting = Setting(sizes, chosen.source, chosen.fused)
    if missing := [f"{peer} ({how})" for peer, how in OTHERS.items() if not is_here(peer)]:
        print(f"bench peers: without {', '.join(missing)}\n", flush=True)
    tiny = Setting(Sizes(**{**asdict(sizes), "sequence": 8}), chosen.source, chosen.fused)
    if chosen.memory:
        for world in chosen.ranks:
            for family in chosen.families:
                for system in chosen_systems(family, world, sizes.batch, chosen.only):
                    print(
                        f"{world} ranks, {family}: {system.name}: "
                        f"{fresh(world, tiny, family, system.name) / 2**20:.0f} MiB",
                        flush=True,
                    )
        return
    report: dict[str, Any] = {
        "machine": machine(),
        "workload": {**asdict(sizes), "source": chosen.source, "fused": chosen.fused},
        "tables": {},
    }
    texts = []
    for world in chosen.ranks:
        peaks: dict[str, float] = {}
        for family in chosen.families:
            systems = chosen_systems(family, world, sizes.batch, chosen.only)
            check_room(0 if chosen.small else world * len(systems) * ROOM)
            found = run(world, measure, setting, family, chosen.only, chosen.rounds, chosen.warm)[0]
            if not chosen.no_memory:
                peaks |= {name: fresh(world, tiny, family, name) for name in found if name not in peaks}
            table, pairs = rows(found, peaks, sizes.batch * sizes.sequence), paired(found, systems)
            report["tables"][f"{family}-{world}"] = {"systems": table, "paired": pairs, "rounds": found}
            texts.append(markdown(f"{world} ranks, {family}", table, pairs))
            print(texts[-1] + "\n", flush=True)
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if chosen.out != "-":
        write(
            chosen.out,
            "Peers on the reference workload",
            report,
            texts,
            NOTE.format(rounds=chosen.rounds, warm=chosen.warm),
        )


def write(name: str, title: str, report: dict[str, Any], texts: list[str], note: str) -> None:
    """bench/results/NAME.json and NAME.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    facts = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in {**report["machine"], **report["workload"]}.items()
    )
    (RESULTS / f"{name}.md").write_text("\n\n".join([f"# {title}", f"{note} {facts}.", *texts]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
