"""How long the search takes: jobs from one node to 16,384 devices, with the plans of the space, those that had to be
priced, and plans a second.

Each figure is the median of the rounds, wall and CPU time of the search in this process, after one search that is not
counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.model_parser import read_model
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.job import Job
from meshwright.spec.workload import Workload

JOBS = (
    ("llama2-7b", "1x8:a100-80gb", 512, 4096, "bf16"),
    ("mixtral-8x7b", "4x8:h100", 512, 4096, "bf16"),
    ("gpt3-175b", "128x8:a100-80gb", 1536, 2048, "bf16"),
    ("gpt3-175b", "2048x8:h100", 4096, 2048, "bf16"),
    ("llama2-70b", "16x8:h100+16x8:a100-80gb+16x8:a100-40gb+16x8:v100-32gb", 1024, 4096, "fp16"),
)


def job_of(model: str, cluster: str, batch: int, sequence: int, precision: str) -> Job:
    workload = Workload(batch=batch, sequence=sequence, precision=precision)  # type: ignore[arg-type]
    return Job(model=read_model(model), cluster=read_cluster(cluster), workload=workload)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench search", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    print("| job | devices | plans | priced | wall s | CPU s | priced a CPU second |\n|---|---|---|---|---|---|---|")
    for row in JOBS:
        job = job_of(*row)
        wall, cpu = [], []
        for _ in range(rounds + 1):
            began, used = time.perf_counter(), time.process_time()
            search_plans(job)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        found = search_top_plans(job, 10)
        took = statistics.median(cpu[1:])
        cells = (
            f"{found.space.considered:,}",
            f"{found.priced:,}",
            f"{statistics.median(wall[1:]):.3f}",
            f"{took:.3f}",
        )
        print(
            f"| {row[0]} on {row[1]} | {job.cluster.devices:,} | {' | '.join(cells)} | {found.priced / took:,.0f} |",
            flush=True,
        )
