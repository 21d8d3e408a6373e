"""What recompute costs and saves on the reference workload, by each of its ways and within budgets of bytes, beside
what the planner says of it.

All plans take a step in each round, in random order, on the same batch, as peers do; a time is divided by that of
keeping everything in the same
round. Then each takes one step more whose allocations are watched: its peak is held against the estimate and, where a
budget was set, against that.
The plan of a budget is the planner's choice, micro-batch and degrees pinned; beside it stands the quickest of all plans
within the budget, priced
one by one. A block of the reference model is a tenth of its peak and more; how near a budget small blocks come is told
by a model of 32 narrow ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from bench.peers import ROOM, batch_of, check_room, default_source, in_turn, machine, spread, write
from bench.ranks import run
from bench.systems import Setting, Sizes

SHARES = (0.2, 0.4, 0.6, 0.8)
"""Budgets, between what recomputing every block takes and what keeping everything does."""
WAYS = (
    "",
    ".rc-sac",
    ".rc-full4+sac",
    ".rc-full",
    ".rc-full4",
    ".rc-attn",
    ".off-activations",
    ".rc-full.off-activations",
    ".off-activations-disk",
    ".rc-sac.off-activations-disk",
)
"""Behind the name of the plan that keeps everything; on cores what leaves for the host's memory stays in the rank's."""
NARROW = Sizes(layers=32, hidden=192, heads=3, ffn=512)
SHAPE = ("layers", "hidden", "heads", "ffn", "vocab")
HELD = ("parameters", "gradients", "optimizer")
MIB = 2**20
NOTE = (
    "{rounds} rounds after {warm} to warm up; medians with quartiles. A step is that of the slowest rank; a peak is "
    "of the rank with the highest one, counted by torch's profiler in one more step. The planner refuses activations "
    "in the host's memory where devices are cores: their estimate is that of the same plan without."
)


def kept_by(world: int, sizes: Sizes) -> str:
    """The name of the plan that keeps everything."""
    return f"dp{world}.mb{sizes.batch // world}"


def question(world: int, sizes: Sizes, budget: float = 0.0) -> Any:
    """The planner's: recompute alone is left to choose."""
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes as Architecture
    from meshwright.planner.inputs.cluster_parser import read_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.workload import Workload

    shape = Architecture(kind="llama", seq=sizes.sequence, **{name: getattr(sizes, name) for name in SHAPE})
    pins = {
        "dp_replicate": world,
        "zero": 0,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "micro_batch": sizes.batch // world,
        "offload": (),
    }
    return Job(
        model=model_spec("llama", shape),
        cluster=read_cluster(f"1x{world}:cpu").but(budget=budget),
        workload=Workload(batch=sizes.batch, sequence=sizes.sequence, precision="fp32"),
        pins=pins,
    )


def estimated(world: int, sizes: Sizes, plan: str) -> Any:
    """The planner's estimate of what runs: on cores what waits in the host's memory is in the rank's."""
    from meshwright.planner.cost.step import estimate
    from meshwright.spec.enums import DISK_OFFLOADS
    from meshwright.spec.plan import parse_plan

    wanted = parse_plan(plan)
    return estimate(
        question(world, sizes), wanted.but(offload=tuple(what for what in wanted.offload if what in DISK_OFFLOADS))
    )


def every_price(job: Any) -> Iterator[tuple[float, float]]:
    """Seconds and bytes of every plan that the question leaves, one by one."""
    from meshwright.planner.cost.communicators import driver_bytes
    from meshwright.planner.cost.cost_model import CostModel
    from meshwright.planner.cost.memory import reserved_bytes
    from meshwright.planner.cost.plan_grid import grid_of_plan
    from meshwright.planner.search.space import PlanSpace

    pricer = CostModel(job)
    for box in PlanSpace(job).boxes():
        for index in np.argwhere(np.broadcast_to(box.legal[0], box.shape)).tolist():
            one = grid_of_plan(box.plan(tuple(index)), job.workload.batch, job.model.blocks)
            prices, driver = pricer.price(one), driver_bytes(pricer.setting, one)
            yield prices.step.item(), float(reserved_bytes(pricer.setting, prices.allocated, driver)[0].item())


def budgets(world: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Each budget with the plan that the planner chooses, and how many times as long its step is as that of the
    quickest plan within it, by estimate."""
    from meshwright.planner.search.ranking import search_plans

    whole = kept_by(world, sizes)
    least, most = (estimated(world, sizes, f"{whole}{way}").memory.reserved for way in (".rc-full", ""))
    every = list(every_price(question(world, sizes)))
    found = []
    for share in SHARES:
        budget = least + share * (most - least)
        chosen = search_plans(question(world, sizes, budget), top=1).chosen
        quickest = min(seconds for seconds, size in every if size <= budget)
        found.append(
            {
                "budget": budget,
                "plan": chosen.name,
                "over_quickest": chosen.estimate.time.step / quickest,
                "choices": len(every),
            }
        )
    return found


def measure(
    setting: Setting, plans: list[str], rounds: int, warm: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, int]]]:
    """On every rank: rounds of each plan, and the bytes of its watched step."""
    from meshwright.train.memory import trace_memory
    from meshwright.train.trainer import parallelize

    trainers = {plan: parallelize(setting.model(), setting.optimizer, plan) for plan in plans}
    steps = {plan: lambda batch, trainer=trainer: (trainer.step(batch).loss, 1.0) for plan, trainer in trainers.items()}  # type: ignore[misc]
    found, taken = in_turn(steps, setting.sizes, rounds, warm), {}
    for plan, trainer in trainers.items():
        with trace_memory() as watch:
            trainer.step(batch_of(setting.sizes, warm + rounds))
        held = trainer.bytes()
        peak = (
            sum(size for kind, size in held.items() if kind != "offloaded")
            + trainer.passing
            + watch.peak
            - watch.remaining
        )
        taken[plan] = {"peak": peak, **held}
    for trainer in trainers.values():
        trainer.close()
    return found, taken


def rows(
    world: int, sizes: Sizes, found: dict[str, list[dict[str, Any]]], ranks: list[dict[str, dict[str, int]]]
) -> dict[str, dict[str, Any]]:
    """What was measured of each plan beside its estimate; times over those of the plan that keeps everything."""
    whole = kept_by(world, sizes)
    base, table = estimated(world, sizes, whole), {}
    for plan, steps in found.items():
        price, pairs = (
            estimated(world, sizes, plan),
            [pair for pair in zip(steps, found[whole], strict=True) if not pair[0]["warm"]],
        )
        table[plan] = {
            "ratio": spread([mine["seconds"] / other["seconds"] for mine, other in pairs]) if pairs else None,
            "seconds": spread([mine["seconds"] for mine, _ in pairs])[1] if pairs else None,
            "estimated_ratio": None if ".off-" in plan else price.time.step / base.time.step,
            "peak": max(rank[plan]["peak"] for rank in ranks),
            "estimated_peak": price.memory.total,
            "states_exact": all(rank[plan][kind] == getattr(price.memory, kind) for rank in ranks for kind in HELD),
            "losses_equal": [step["loss"] for step in steps] == [step["loss"] for step in found[whole]],
        }
    return table


def of_ways(table: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| plan | step over keeping all [quartiles] | by estimate | step s | peak MiB | estimated | estimate over "
        "measured | states exact | losses bit-identical |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for plan, row in table.items():
        low, middle, high = row["ratio"]
        lines.append(
            f"| {plan} | {middle:.2f} [{low:.2f}, {high:.2f}] | {ratio(row['estimated_ratio'])} | "
            f"{row['seconds']:.2f} | {row['peak'] / MIB:.1f} | {row['estimated_peak'] / MIB:.1f} | "
            f"{row['estimated_peak'] / row['peak'] - 1:+.1%} | {yes(row['states_exact'])} | "
            f"{yes(row['losses_equal'])} |"
        )
    return "\n".join(lines)


def of_budgets(table: dict[str, dict[str, Any]], chosen: list[dict[str, Any]], block: float) -> str:
    lines = [
        "| budget MiB | the planner's plan | step over keeping all [quartiles] | by estimate | step over the "
        "quickest of all plans within it, by estimate | peak MiB | under the budget |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in chosen:
        row = table[each["plan"]]
        time = (
            "not timed"
            if row["ratio"] is None
            else f"{row['ratio'][1]:.2f} [{row['ratio'][0]:.2f}, {row['ratio'][2]:.2f}]"
        )
        lines.append(
            f"| {each['budget'] / MIB:.1f} | {each['plan']} | {time} | {row['estimated_ratio']:.2f} | "
            f"{each['over_quickest']:.3f} of {each['choices']} | {row['peak'] / MIB:.1f} | "
            f"{1 - row['peak'] / each['budget']:.1%} |"
        )
    middle = chosen[len(chosen) // 2]["budget"]
    return (
        "\n".join(lines)
        + f"\n\nWhat one block more or less changes: {block / MIB:.1f} MiB, {block / middle:.1%} of a budget in "
        "the middle."
    )


def ratio(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def block_of(world: int, sizes: Sizes) -> float:
    """Bytes by which plans differ that recompute one block more or less."""
    whole = kept_by(world, sizes)
    one, two = (estimated(world, sizes, f"{whole}.rc-full{count}").memory.total for count in (1, 2))
    return float(one - two)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recompute", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--source", choices=["huggingface", "own"], default=default_source())
    parser.add_argument("--small", action="store_true", help="a tiny model: to see that everything runs")
    parser.add_argument("--out", default="recompute", help="name of the files in bench/results, or - for none")
    given = parser.parse_args(arguments)
    sizes = Sizes(hidden=64, heads=4, ffn=128, vocab=512, sequence=32) if given.small else Sizes()
    narrow = Sizes(layers=32, hidden=32, heads=2, ffn=64, vocab=512, sequence=32) if given.small else NARROW
    report: dict[str, Any] = {"machine": machine(), "workload": {**asdict(sizes), "source": given.source}, "tables": {}}
    texts: list[str] = []

    def add(title: str, text: str, **kept: Any) -> None:
        report["tables"][title] = kept
        texts.append(f"### {title}\n\n{text}")
        print(texts[-1] + "\n", flush=True)

    for world in given.ranks:
        chosen, whole = budgets(world, sizes), kept_by(world, sizes)
        ways = [whole + way for way in WAYS]
        plans = list(dict.fromkeys([*ways, *(each["plan"] for each in chosen)]))
        check_room(0 if given.small else world * len(plans) * ROOM)
        ranks = run(world, measure, Setting(sizes, given.source, fused=True), plans, given.rounds, given.warm)
        table = rows(world, sizes, ranks[0][0], [taken for _, taken in ranks])
        title = f"{world} rank{'s' if world > 1 else ''}"
        add(title, of_ways({plan: table[plan] for plan in ways}), plans=table, rounds=ranks[0][0])
        add(f"{title}, budgets", of_budgets(table, chosen, block_of(world, sizes)), budgets=chosen)
    chosen = budgets(1, narrow)
    plans = list(dict.fromkeys([kept_by(1, narrow), *(each["plan"] for each in chosen)]))
    found, taken = run(1, measure, Setting(narrow, given.source, fused=True), plans, 0, 1)[0]
    table = rows(1, narrow, found, [taken])
    add(
        f"1 rank, {narrow.layers} blocks {narrow.hidden} wide, budgets",
        of_budgets(table, chosen, block_of(1, narrow)),
        plans=table,
        budgets=chosen,
    )
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    if given.out != "-":
        write(
            given.out,
            "Recompute on the reference workload",
            report,
            texts,
            NOTE.format(rounds=given.rounds, warm=given.warm),
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
