"""Measures the cost of the analysis and its checks at the start of a run, for a model of about 1 B parameters.

python -m bench.analysis                    # writes bench/results/analysis.md
python -m bench.analysis --blocks 4         # a trial with fewer blocks, which writes nothing
python -m bench.analysis --profile tp2      # the functions with the largest times

The model is a Llama of transformers on the meta device, which is how a run builds it before it loads weights. Each plan
is measured in a fresh process: every pass of the build that reads the model before the model is changed. The goal
applies to CPU seconds, because other work on the machine changes them little. The table shows wall seconds too.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import pstats
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn

from bench.proof import SIZES
from meshwright.runtime.build.passes.analyze import analyze
from meshwright.runtime.build.passes.check_plan import check_plan
from meshwright.runtime.build.passes.partition_stages import partition_stages
from meshwright.runtime.build.passes.probe_optimizer import probe_optimizer
from meshwright.runtime.build.passes.record import Build, ModelHints
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import recipe

RESULT = Path(__file__).parent / "results" / "analysis.md"
GOAL_SECONDS = 5.0
PLANS = ("dp2", "dp2.z3", "tp2", "pp2", "tp2.sp", "dp2.tp2.pp2.z1")
PHASES = {
    "trace": "meshwright.analysis.analyze._trace_with_fallback",
    "checks of shards": "meshwright.analysis.analyze.accept_verified_regions",
    "data flow": "meshwright.runtime.build.stages.partition.record_dataflow",
}
"""The phases of the passes, with the function that runs each."""
PASSES = {"optimizer": probe_optimizer}


def model_of(blocks: int) -> nn.Module:
    """Returns a Llama on the meta device."""
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=blocks, max_position_embeddings=2048, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def measured(blocks: int, name: str) -> dict[str, Any]:
    """Returns wall and CPU seconds by phase, and the bytes by which the phases raise the peak memory."""
    model, plan = model_of(blocks), parse_plan(name)
    phases: dict[str, list[float]] = {}

    def timed(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                spent = phases.setdefault(phase, [0.0, 0.0])
                spent[0] += time.perf_counter() - wall
                spent[1] += time.process_time() - cpu

        return run

    build = Build()
    build.model, build.recipe, build.hints = model, recipe("fp32"), ModelHints()
    build.base = ParallelContext(plan, cast(Any, None), torch.device("cpu"))
    build.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def passes() -> None:
        for each in (analyze, check_plan, partition_stages):
            each(build)
        timed("optimizer", probe_optimizer)(build)

    with ExitStack() as stack:
        for phase, where in PHASES.items():
            module, _, function = where.rpartition(".")
            own = getattr(__import__(module, fromlist=[function]), function)
            stack.enter_context(patch(where, timed(phase, own)))
        timed("all", passes)()
    phases["other"] = [
        phases["all"][at] - sum(spent[at] for phase, spent in phases.items() if phase != "all") for at in (0, 1)
    ]
    peak = 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"phases": phases, "bytes": peak, "elements": sum(one.numel() for one in model.parameters())}


def in_process(blocks: int, name: str) -> dict[str, Any]:
    """Runs `measured` in a process forked from this one, which has imported every module and run no pass."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        theirs.send(measured(blocks, name))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    theirs.close()
    try:
        return cast(dict[str, Any], ours.recv())
    finally:
        process.join()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.analysis")
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--profile", metavar="PLAN", help="print a profile of one plan")
    chosen = parser.parse_args(arguments)
    from bench.ranks import warm

    warm()
    if chosen.profile:
        torch.set_num_threads(1)
        profile = cProfile.Profile(time.process_time)
        profile.runcall(measured, chosen.blocks, chosen.profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45).sort_stats("cumtime").print_stats(90)
        return
    names = chosen.plans.split(",")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(chosen.rounds):
        for name in names:
            found[name].append(in_process(chosen.blocks, name))
    columns = (*PHASES, *PASSES, "other")
    lines = [
        "# Cost of analysis and checks at the start\n",
        f"A Llama of {found[names[0]][0]['elements'] / 1e9:.2f} B parameters ({chosen.blocks} blocks) on the meta "
        f"device, one process with one thread, medians of {chosen.rounds} rounds over all plans. "
        f"Goal: {GOAL_SECONDS:.0f} CPU s. Written by `python -m bench.analysis`.\n",
        f"| plan | {' | '.join(columns)} | all, CPU s | all, wall s | memory, MiB |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for name, runs in found.items():

        def spent(phase: str, at: int, runs: list[dict[str, Any]] = runs) -> float:
            return median(run["phases"].get(phase, (0.0, 0.0))[at] for run in runs)

        parts = " | ".join(f"{spent(phase, 1):.2f}" for phase in columns)
        size = median(run["bytes"] for run in runs) / 2**20
        lines.append(f"| `{name}` | {parts} | {spent('all', 1):.2f} | {spent('all', 0):.2f} | {size:.0f} |")
    lines.append(f"\nLoad of the machine: {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores.")
    print("\n".join(lines))
    if chosen.blocks == 22 and names == list(PLANS):
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
