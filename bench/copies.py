"""What copies of every step in memory cost when nothing fails: steps with and without, interleaved in one job.

In each round one step is made with a copy after it, as `meshwright train` makes them, and one without, in random order, the same on all ranks, after a
barrier. Wall time is that of the slowest rank, CPU time the sum over ranks; the share is that of a round's two steps, so that load from outside cancels as
far as it can. A copy takes what a rank's part of the states takes, whatever the batch: its share falls with the tokens of a step. Goal: 1 %.
"""

from __future__ import annotations

import argparse
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
from meshwright.base.pulse import Pulse, opened
from meshwright.models.registry import build
from meshwright.train.copies import Copies
from meshwright.train.trainer import parallelize

SIZES = {"kind": "llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 4096, "seq": 256}


def measure(plan: str, rows: int, rounds: int, folder: str) -> dict[str, Any]:
    """On every rank: seconds and CPU seconds of each round, without and with a copy, and the bytes of this rank's copy."""
    torch.manual_seed(1)
    model = build(dict(SIZES))
    trainer = parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4), plan, clip=1.0)
    path = Path(folder) / f"copies-{trainer.mesh.rank}"
    path.touch()
    copies = Copies(str(path), trainer, Pulse(opened("", trainer.plan.world), trainer.mesh.rank), {})
    order, found = random.Random(0), []
    for index in range(rounds + 3):
        ids = torch.randint(0, SIZES["vocab"], (rows, SIZES["seq"]), generator=torch.Generator().manual_seed(index))  # type: ignore[call-overload]
        taken: dict[bool, tuple[float, float]] = {}
        for kept in order.sample([False, True], 2):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            record = trainer.step({"input_ids": ids, "labels": ids})
            if kept:
                copies.begin(record.model_dump(exclude_none=True))
                copies.finish()
            dist.barrier()
            sums = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(sums)
            taken[kept] = time.perf_counter() - wall, float(sums)
        assert not copies.refused, copies.refused
        found.append([*taken[False], *taken[True]])
    return {"rounds": found[3:], "bytes": path.stat().st_size}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench copies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--plans", default="dp2,dp2.z1,dp2.z3")
    parser.add_argument("--rows", default="8,32,128", help="sequences of a step")
    parser.add_argument("--out", default="copies", help="file in bench/results; -: none")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(), "workload": SIZES, "table": []}
    lines = [
        "| plan | tokens a step | copies of all ranks, MiB | step s | CPU of a copy, share of a step | wall, share |",
        "|---|---|---|---|---|---|",
    ]
    for plan in given.plans.split(","):
        world = int(plan.partition(".")[0].removeprefix("dp"))
        for rows in map(int, given.rows.split(",")):
            with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
                ranks = run(world, measure, plan, rows, given.rounds, folder)
            rounds = ranks[0]["rounds"]
            share = {name: spread([each[at + 2] / each[at] - 1 for each in rounds]) for at, name in enumerate(("wall", "cpu"))}
            size, step = sum(rank["bytes"] for rank in ranks), spread([each[0] for each in rounds])
            report["table"].append({"plan": plan, "tokens": rows * 256, "bytes": size, "seconds": step, **share})
            cells = [f"{share[name][1]:+.1%} [{share[name][0]:+.1%}, {share[name][2]:+.1%}]" for name in ("cpu", "wall")]
            lines.append(f"| {plan} | {rows * 256} | {size >> 20} | {step[1]:.3f} | {cells[0]} | {cells[1]} |")
            print(lines[-1], flush=True)
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if given.out != "-":
        write(given.out, "Copies in memory", report, ["\n".join(lines)], f"Medians of {given.rounds} rounds with quartiles.")


if __name__ == "__main__":
    main(sys.argv[1:])
