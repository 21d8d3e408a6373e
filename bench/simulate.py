"""How long one step and one fleet take to play, in CPU seconds, and how far the play is from the estimate.

Each figure is the median of the rounds in one process without the cyclic garbage collector, as the command line plays.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.peers import machine, write
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.model_parser import read_model
from meshwright.planner.simulate.fleet import (
    DEFAULT_FAILURE_SOURCE,
    FleetSpec,
    RecoveryPolicy,
    fleet_table,
    parse_failure_rate,
    simulate_fleet,
)
from meshwright.planner.simulate.run import simulate
from meshwright.spec.faults import Faults
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload

STEPS = (
    ("dp128.tp8.sp.pp16.z1.rc-full", 256, Faults()),
    ("dp64.tp8.sp.pp32.z1.rc-full", 256, Faults()),
    ("dp128.tp8.sp.pp16.z1.rc-full.interleaved7", 256, Faults()),
    ("dp128.tp8.sp.pp16.z2.rc-full", 256, Faults()),
    ("dp2048.tp8.z3.rc-full", 4, Faults()),
    (
        "dp128.tp8.sp.pp16.z1.rc-full",
        256,
        Faults.model_validate({"slow": [(3, 1.5), (5000, 1.2)], "link": [(9000, 0.5)]}),
    ),
)
"""Plans on 16,384 devices, micro-batches of a replica, faults."""
DAY = 86400.0


def timed(rounds: int, call: Callable[[], Any]) -> tuple[float, Any]:
    found, seconds = None, []
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        began = time.process_time()
        found = call()
        seconds.append(time.process_time() - began)
        gc.enable()
    return median(seconds), found


def measure(rounds: int) -> list[dict[str, Any]]:
    table = []
    for name, micro_batches, faults in STEPS:
        plan = parse_plan(name)
        workload = Workload(batch=micro_batches * plan.dp, sequence=8192, precision="bf16")
        job = Job(model=read_model("llama3-405b"), cluster=read_cluster("2048x8:h100"), workload=workload)
        seconds, played = timed(rounds, lambda job=job, plan=plan, faults=faults: simulate(job, plan, faults))  # type: ignore[misc]
        away = played.healthy / played.estimate.time.step - 1.0
        words = f"{name}, {micro_batches} micro-batches" + (f", {len(faults.ranks)} faults" if faults.ranks else "")
        table.append({"what": words, "seconds": seconds, "from_estimate": away})
    rate = parse_failure_rate(DEFAULT_FAILURE_SOURCE).per_device_hour
    fleet = FleetSpec(devices=100_000, failures_per_device_hour=rate, spares=70)
    seconds, outcome = timed(rounds, lambda: simulate_fleet(fleet, RecoveryPolicy(), 90 * DAY))
    away = outcome.shares.progress - outcome.expected.progress
    table.append({"what": "90 days of 100,000 devices, 12 plays", "seconds": seconds, "from_estimate": away})
    seconds, cells = timed(rounds, lambda: list(fleet_table(rate)))
    worst = max((cell.outcome.shares.progress - cell.outcome.expected.progress for cell in cells), key=abs)
    table.append({"what": "fleet table, 28 fleets of 54 days", "seconds": seconds, "from_estimate": worst})
    return table


def markdown(table: list[dict[str, Any]]) -> str:
    lines = ["| played | CPU s | play against estimate or formula |", "|---|---|---|"]
    lines += [f"| {row['what']} | {row['seconds']:.2f} | {row['from_estimate']:+.2%} |" for row in table]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="simulate")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(), "workload": {"model": "llama3-405b on 2048x8:h100, sequence 8192"}}
    report["table"] = table = measure(chosen.rounds)
    print(markdown(table) + "\n", flush=True)
    if chosen.out != "-":
        write(chosen.out, "Simulation", report, [markdown(table)], f"Medians of {chosen.rounds} rounds.")


if __name__ == "__main__":
    sys.exit(main())
