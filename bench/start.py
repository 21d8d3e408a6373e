"""How long the command line takes to start and to plan, as a ratio to a Python that does nothing.

A row "again" asks a question whose answer is in the cache. Each round runs the commands once in random order; a figure
is the median of the rounds, wall and CPU time, with the ratio to `python -c pass` of the same round.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers import machine, spread, write

PLAN = ["plan", "--model", "llama-65b", "--cluster", "8x8:a100-40gb", "--batch", "512", "--seq", "2048", "--json"]
NOTHING = "python -c pass"


def commands() -> dict[str, list[str]]:
    beside = Path(sys.executable).with_name("meshwright")
    ours = str(beside) if beside.exists() else shutil.which("meshwright") or "meshwright"
    return {
        NOTHING: [sys.executable, "-c", "pass"],
        "python -c 'import meshwright'": [sys.executable, "-c", "import meshwright"],
        "meshwright --help": [ours, "--help"],
        "meshwright plan llama-65b --fresh": [ours, *PLAN, "--fresh"],
        "meshwright plan llama-65b, again": [ours, *PLAN],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    }


def once(command: list[str]) -> dict[str, float]:
    """Wall and CPU seconds. A command that fails has no time: raises RuntimeError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-300:]}")
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(rounds: int) -> list[dict[str, Any]]:
    known = commands()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in known}
    order = random.Random(0)
    for index in range(rounds + 1):
        for name in order.sample(sorted(known), len(known)):
            taken = once(known[name])
            if index:  # the first round fills the page cache
                found[name].append(taken)
    return [
        {
            "command": name,
            "seconds": spread([run["wall"] for run in runs]),
            "cpu_seconds": spread([run["cpu"] for run in runs]),
            "ratio": spread([run["wall"] / base["wall"] for run, base in zip(runs, found[NOTHING], strict=True)]),
        }
        for name, runs in found.items()
    ]


def markdown(table: list[dict[str, Any]]) -> str:
    lines = ["| command | wall s [quartiles] | CPU s | ratio to `python -c pass` |", "|---|---|---|---|"]
    for row in table:
        low, wall, high = row["seconds"]
        lines.append(
            f"| `{row['command']}` | {wall:.3f} [{low:.3f}, {high:.3f}] | {row['cpu_seconds'][1]:.3f} | "
            f"{row['ratio'][1]:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.start", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="start")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(), "workload": {"plan": " ".join(PLAN)}}
    table = measure(chosen.rounds)
    report["table"] = table
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    print(markdown(table) + "\n", flush=True)
    if chosen.out != "-":
        write(chosen.out, "Starting", report, [markdown(table)], f"Medians of {chosen.rounds} rounds.")


if __name__ == "__main__":
    sys.exit(main())
