"""What copies of every step in memory cost when nothing fails: steps with and without, interleaved in one job.

In each round one step is made with a copy after it, as `meshwright train` makes them, and one without, in random order,
the same on all ranks, after a
barrier. Wall time is that of the slowest rank, CPU time the sum over ranks; the share is that of a round's two steps,
so that load from outside cancels as
far as it can. Beside it the CPU time of the copies themselves, which no difference of two long steps blurs. A case
takes `--seconds`, and at least LEAST rounds. A copy takes what
a rank's part of the states takes, whatever the batch: its share falls with the tokens of a step. Goal: 1 %.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.peers import machine, spread, write
from bench.ranks import run
from meshwright.core.ipc import Heartbeat, open_heartbeats
from meshwright.models.registry import build_reference_model
from meshwright.train.memory_checkpointer import MemoryCheckpointer
from meshwright.train.trainer import parallelize

LEAST = 8
"""Rounds of a case, whatever they take."""
WARM = 2
SIZES = {"kind": "llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096, "seq": 256}


def measure(plan: str, rows: int, seconds: float, folder: str) -> dict[str, Any]:
    """On every rank: seconds and CPU seconds of each round, without and with a copy, and those of the copies alone; the
    bytes of this rank's copy."""
    torch.manual_seed(1)
    model = build_reference_model(dict(SIZES))
    trainer = parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4), plan, clip=1.0)
    path = Path(folder) / f"copies-{trainer.mesh.rank}"
    path.touch()
    copies = MemoryCheckpointer(
        str(path), trainer, Heartbeat(open_heartbeats("", trainer.plan.world), trainer.mesh.rank), {}
    )
    order, found, began = random.Random(0), [], time.perf_counter()
    for index in itertools.count():
        ids = torch.randint(0, SIZES["vocab"], (rows, SIZES["seq"]), generator=torch.Generator().manual_seed(index))  # type: ignore[call-overload]
        taken: dict[bool, tuple[float, float]] = {}
        alone = 0.0
        for kept in order.sample([False, True], 2):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            record = trainer.step({"input_ids": ids, "labels": ids})
            if kept:
                start = time.process_time()
                copies.begin(record.model_dump(exclude_none=True))
                copies.finish()
                alone = time.process_time() - start
            dist.barrier()
            sums = torch.tensor([time.process_time() - cpu, alone], dtype=torch.float64)
            dist.all_reduce(sums)
            taken[kept] = time.perf_counter() - wall, float(sums[0])
            alone = float(sums[1]) if kept else alone
        assert not copies.refused, copies.refused
        found.append([*taken[False], *taken[True], alone])
        over = torch.tensor([float(index + 1 >= WARM + LEAST and time.perf_counter() > began + seconds)])
        dist.broadcast(over, 0)
        if over:
            return {"rounds": found[WARM:], "bytes": path.stat().st_size}
    raise AssertionError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench copies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0, help="of each case")
    parser.add_argument("--plans", default="dp2,dp2.z1,dp2.z3")
    parser.add_argument("--rows", default="8,32", help="sequences of a step")
    parser.add_argument("--out", default="copies", help="file in bench/results; -: none")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(), "workload": SIZES, "table": []}
    lines = [
        "| plan | tokens a step | copies of all ranks, MiB | rounds | step s | CPU of a copy, share of a step's | "
        "CPU of both steps, with and without | wall of both |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan in given.plans.split(","):
        world = int(plan.partition(".")[0].removeprefix("dp"))
        for rows in map(int, given.rows.split(",")):
            with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
                ranks = run(world, measure, plan, rows, given.seconds, folder)
            rounds = ranks[0]["rounds"]
            share = {
                name: spread([each[at + 2] / each[at] - 1 for each in rounds])
                for at, name in enumerate(("wall", "cpu"))
            }
            share["alone"] = spread([each[4] / each[1] for each in rounds])
            size, step = sum(rank["bytes"] for rank in ranks), spread([each[0] for each in rounds])
            report["table"].append({"plan": plan, "tokens": rows * 256, "bytes": size, "seconds": step, **share})
            cells = [
                f"{share[name][1]:+.1%} [{share[name][0]:+.1%}, {share[name][2]:+.1%}]"
                for name in ("alone", "cpu", "wall")
            ]
            lines.append(
                f"| {plan} | {rows * 256} | {size >> 20} | {len(rounds)} | {step[1]:.3f} | {' | '.join(cells)} |"
            )
            print(lines[-1], flush=True)
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if given.out != "-":
        write(given.out, "Copies in memory", report, ["\n".join(lines)], "Medians over the rounds, with quartiles.")


if __name__ == "__main__":
    main(sys.argv[1:])
