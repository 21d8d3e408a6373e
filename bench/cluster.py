"""Regret on emulated clusters: plans run by real ranks behind shaped links, predicted beside measured; what unlike
replicas gain by shares.

    python -m bench.cluster              all cases, at least PLANS plans of each; writes bench/results/cluster.md
    python -m bench.cluster tiered       the cases whose name has the word
    python -m bench.cluster --anew       forgets what earlier runs measured; without it cases that are done are not run
    again
    python -m bench.cluster --cores=0.6  so much of the machine plays the cluster: beside other programs, in slower
    motion

Each case: the cluster is emulated, probed by its ranks, the job searched on what the probe found, PLANS plans spread
over the whole ranking
are run for STEPS steps each. A case ends after MINUTES with the plans it has. Regret is the measured time of the
planner's first choice over the best measured one, less 1. Root only.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo

from bench.emulation.emulated_cluster import EmulatedCluster, emulate_cluster, scale_to_machine
from bench.slowed import slowed
from bench.slowed import table as slowed_table
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.units import show_rate, show_seconds
from meshwright.planner.cost.calibration import calibrate
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import available_cpus
from meshwright.planner.inputs.cluster_syntax import parse_cluster
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.search.trials import Trial, next_trial
from meshwright.runtime.profiler.device import measure_cluster
from meshwright.spec import grid
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job, LaunchSpec, ModelSource
from meshwright.spec.plan import Plan
from meshwright.train.measured_runs import TrialRunner
from meshwright.train.rank_main import join_process_groups

PLANS, STEPS, TRIALS = 20, 3, 5
MINUTES = 3.0
"""After which no further plan of a case is begun."""

HOURS = 6
"""After which what an earlier run measured is forgotten."""

ROWS = 4
"""Of a micro-batch where shares are set against the even split."""

CORE = 80e9
RESULTS = Path(__file__).parent / "results" / "cluster.md"
SIZES = {
    "kind": "llama",
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 688,
    "vocab": 512,
    "seq": 128,
}


class Case(NamedTuple):
    """A job on a cluster. `slow`: groups whose devices have a part of the described speed. `slows`: afterwards one rank
    slows down and recovers."""

    name: str
    cluster: str
    batch: int
    slow: tuple[float, ...] = ()
    sequence: int = 128
    slows: bool = False

    @property
    def described(self) -> Cluster:
        cluster = parse_cluster(self.cluster)
        groups = []
        for group, part in zip(cluster.groups, self.slow or [1.0] * len(cluster.groups), strict=True):
            peak = {name: rate * part for name, rate in group.device.peak.items()}
            groups.append(group.but(device=group.device.but(peak=peak, bandwidth=group.device.bandwidth * part)))
        return cluster.but(groups=tuple(groups))


CASES = (
    Case("flat, slow links", "4x1:cpu@0.4Gb", 16),
    Case("flat, fast links", "4x1:cpu@8Gb", 32, sequence=64, slows=True),
    Case("tiered 2x2, slow network", "2x2:cpu@0.4Gb", 16),
    Case("tiered 2x2, fast network", "2x2:cpu@4Gb", 32),
    Case("one host", "1x4:cpu", 16),
    Case("unlike 1:2", "1x1:cpu+1x1:cpu@4Gb", 24, (0.5, 1.0)),
    Case("unlike 1:1:2:4", "1x1:cpu+1x1:cpu+1x1:cpu+1x1:cpu@4Gb", 32, (0.25, 0.25, 0.5, 1.0)),
)


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(there: EmulatedCluster, case: Case, plans: int) -> dict[str, Any]:
    """`measured(case)` on every rank, forked from this process; what rank 0 found."""

    def here(rank: int) -> dict[str, Any] | None:
        torch.set_num_threads(1)
        found = measured(there, case, rank, plans)
        return dict(json.loads(json.dumps(found))) if rank == 0 else None

    return there.fork(here)[0]


def measured(there: EmulatedCluster, case: Case, rank: int, plans: int) -> dict[str, Any]:
    """What every rank does."""
    world, end = there.world, time.monotonic() + 60 * MINUTES
    connection = join_process_groups(rank, world, timeout=300.0)
    try:
        found = measure_cluster()
        result = calibrate(found, case.described)
        file = read_job(
            None,
            (),
            {
                "model.name": "llama-tiny",
                "workload.batch": case.batch,
                "workload.sequence": case.sequence,
                "workload.precision": "fp32",
            },
        )
        file = file.but(model=file.model.but(sizes={name: size for name, size in SIZES.items() if name != "kind"}))
        question = resolve_job(file).but(cluster=result.cluster)
        launch = LaunchSpec(
            model=ModelSource(name="llama-small", sizes={**SIZES, "tied": False}),
            workload=question.workload,
            data=file.data.but(tokenizer="bytes"),
            plan=Plan(dp_replicate=world),
            run=file.run,
        )
        ground = TrialRunner(launch, STEPS)
        chosen = json.loads(
            connection.tell(
                json.dumps([plan.model_dump(mode="json") for plan in spread(question, plans)]) if rank == 0 else ""
            )
        )
        rows = []
        for data in chosen:
            if not connection.tell("more" if time.monotonic() < end else ""):
                break
            plan = Plan.model_validate(data)
            timed = ground.try_plan(plan)
            if timed.seconds is not None:
                rows.append(
                    {
                        "plan": plan.model_dump(mode="json"),
                        "predicted": estimate(question, plan).time.step,
                        "measured": timed.seconds,
                        "busy": timed.busy,
                    }
                )
        return {
            "job": question.model_dump(mode="json"),
            "rows": rows,
            "odd": list(result.odd),
            "busy": found.busy,
            "probe": found.seconds,
            "slowed": slowed(there, rank, launch, ground) if case.slows else [],
        }
    finally:
        connection.close()


def spread(question: Job, plans: int) -> list[Plan]:
    """The first choice, the best of each kind of degrees, the rest evenly over the ranking; for unlike devices shares
    by speed beside them."""
    ranked = [entry.plan for entry in search_plans(question, 2000, runnable=True).plans]
    kinds: dict[tuple[int, ...], Plan] = {}
    for plan in ranked:
        kinds.setdefault((plan.dp, plan.tp, plan.pp, plan.cp), plan)
    chosen = list(dict.fromkeys([ranked[0], *kinds.values()]))[: plans * 2 // 3]
    step = max(len(ranked) // max(plans - len(chosen), 1), 1)
    chosen = list(dict.fromkeys([*chosen, *ranked[::step]]))[:plans]
    return list(dict.fromkeys([*chosen[:1], *by_speed(question), *chosen]))


def by_speed(question: Job) -> list[Plan]:
    """Data parallel plans of unlike groups: even, and with shares by the speed that was measured."""
    speeds = [
        group.device.peak["fp32"] for group in question.cluster.groups for _ in range(group.nodes * group.devices)
    ]
    if max(speeds) < 1.3 * min(speeds):
        return []
    batch, world = question.workload.batch, len(speeds)
    even = Plan(dp_shard=world, zero=1, micro_batch=ROWS)
    return [even, even.but(shares=grid.micro_batches_by_speed(speeds, batch // ROWS))]


# --- table ------------------------------------------------------------------------------------------------------------


def judged(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Regret with and without trials, errors, rank correlation."""
    question = Job.model_validate(found["job"])
    rows = found["rows"]
    predicted, seconds = [row["predicted"] for row in rows], [row["measured"] for row in rows]
    best, first = min(seconds), seconds[predicted.index(min(predicted))]
    times = {Plan.model_validate(row["plan"]): row["measured"] for row in found["rows"]}
    trials: list[Trial] = []
    while (chosen := next_trial(question, trials, TRIALS)) is not None:
        plan = chosen[0] if chosen[0] in times else nearest(chosen[0], list(times), trials)
        if plan is None:
            break
        trials.append(Trial(plan=plan, predicted=chosen[1], measured=times[plan]))
    return {
        "name": case.name,
        "plans": len(rows),
        "best": best,
        "regret": first / best - 1.0,
        "tried": min((trial.measured or first for trial in trials), default=first) / best - 1.0,
        "error": statistics.median(abs(row["predicted"] / row["measured"] - 1.0) for row in rows),
        "correlation": correlation(predicted, seconds),
        "busy": max([found["busy"], *(row["busy"] for row in found["rows"])]),
    }


def nearest(wanted: Plan, plans: list[Plan], trials: list[Trial]) -> Plan | None:
    """The measured plan that stands for one that was not measured: the same degrees and stage of ZeRO, not tried
    yet."""
    tried = {trial.plan for trial in trials}
    same = [
        plan
        for plan in plans
        if plan not in tried and (plan.dp, plan.tp, plan.pp, plan.cp) == (wanted.dp, wanted.tp, wanted.pp, wanted.cp)
    ]
    return min(
        same,
        key=lambda plan: (
            plan.shares != wanted.shares,
            plan.placement != wanted.placement,
            plan.zero != wanted.zero,
            abs(log(plan.micro_batch / wanted.micro_batch)),
        ),
        default=None,
    )


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: of the ranks."""
    if len(one) < 3:
        return 1.0
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*[list(map(float, each)) for each in places])


def table(judgements: list[dict[str, Any]], unlike: list[str], cases: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Regret on emulated clusters",
        "",
        f"`python -m bench.cluster`, {time.strftime('%d %B %Y')}, {available_cpus()} cores, gloo between hosts, "
        f"shared memory inside; every plan run by real ranks, lower median of {STEPS} steps. Regret: the planner's "
        f"first choice over the best measured plan; with trials: the best of at most {TRIALS} (plans that were not "
        "measured are played by one of the same degrees). Error: median of |predicted / measured - 1|. Others busy: "
        "processors that other programs took meanwhile; above 0.15 the times are disturbed.",
        "",
        "| job | plans | best measured | regret | with trials | error | rank correlation | others busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in judgements:
        lines.append(
            f"| {each['name']} | {each['plans']} | {show_seconds(each['best'])} | {each['regret']:.0%} | "
            f"{each['tried']:.0%} | {each['error']:.0%} | {each['correlation']:.2f} | {each['busy']:.1f} |"
        )
    lines += ["", *unlike]
    for name, found in cases.items():
        cluster = Job.model_validate(found["job"]).cluster
        lines += [
            "",
            f"## {name}",
            "",
            f"Probe {found['probe']:.0f} s: network {show_rate(cluster.network.bandwidth)}, "
            f"{show_seconds(cluster.network.latency)}; a meeting {show_seconds(cluster.groups[0].link.meeting)} "
            f"inside, {show_seconds(cluster.network.meeting)} between. " + "; ".join(found["odd"]),
            "",
            "| plan | predicted | measured |",
            "|---|---|---|",
        ]
        for row in sorted(found["rows"], key=lambda row: row["measured"]):
            lines.append(
                f"| {Plan.model_validate(row['plan']).name} | {show_seconds(row['predicted'])} | "
                f"{show_seconds(row['measured'])} |"
            )
    return "\n".join(lines) + "\n"


def gain(case: Case, found: dict[str, Any]) -> list[str]:
    """Shares by speed against the even split, both measured, and the part of the bound that they reach."""
    times = {Plan.model_validate(row["plan"]): row["measured"] for row in found["rows"]}
    shared = next((plan for plan in times if plan.shares and plan.but(shares=()) in times), None)
    if shared is None:
        return []
    even = shared.but(shares=())
    question = Job.model_validate(found["job"])
    speeds = [
        group.device.peak["fp32"] for group in question.cluster.groups for _ in range(group.nodes * group.devices)
    ]
    bound = sum(speeds) / len(speeds) / min(speeds)
    reached = times[even] / times[shared]
    return [
        f"{case.name}: even split {show_seconds(times[even])}, shares {'-'.join(map(str, shared.shares))} "
        f"{show_seconds(times[shared])}: {reached:.2f} times as fast, {reached / bound:.0%} of the bound {bound:.2f} "
        "(mean over slowest speed as probed).",
        "",
    ]


def main(words: Sequence[str] = ()) -> None:
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).step()
    plans, played = (
        next((kind(word.removeprefix(name)) for word in words if word.startswith(name)), usual)
        for name, kind, usual in (("--plans=", int, PLANS), ("--cores=", float, available_cpus()))
    )
    asked = [word for word in words if not word.startswith("--")]
    kept = Path(tempfile.gettempdir()) / "meshwright-bench-cluster.json"
    fresh = kept.exists() and time.time() - kept.stat().st_mtime < 3600 * HOURS and "--anew" not in words
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if fresh else {}
    for case in CASES:
        if (asked and not any(word in case.name for word in asked)) or (
            not asked and found.get(case.name, {}).get("asked", 0) >= plans
        ):
            continue
        began = time.monotonic()
        try:
            with emulate_cluster(scale_to_machine(case.described, played, CORE)) as there:
                found[case.name] = {**on_ranks(there, case, plans), "asked": plans}
        except InputError:
            raise
        except MeshwrightError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        if not found[case.name]["rows"]:
            del found[case.name]
            print(f"{case.name}: no plan was run within {MINUTES} minutes", file=sys.stderr)
            continue
        kept.write_text(json.dumps(found))
        print(
            judged(case, found[case.name]),
            f"{time.monotonic() - began:.0f} s",
            *gain(case, found[case.name]),
            file=sys.stderr,
            sep="\n",
        )
    cases = {case.name: case for case in CASES if case.name in found}
    unlike = [line for name, case in cases.items() for line in gain(case, found[name])]
    unlike += [
        line for name in cases for line in (slowed_table(found[name]["slowed"]) if found[name]["slowed"] else [])
    ]
    RESULTS.write_text(
        table(
            [judged(case, found[name]) for name, case in cases.items()], unlike, {name: found[name] for name in cases}
        ),
        encoding="utf-8",
    )
    print(RESULTS.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
