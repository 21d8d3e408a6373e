"""A rank of an emulated cluster that slows down in the middle of a run and recovers: when it is found, what adjusted
shares gain, against the optimum.

Each factor: QUIET_STEPS at full speed, SLOW_STEPS with the share of one rank divided by it, BACK_STEPS at full speed
again, shares following the speeds
(`run.balance`). The optimum of n equal ranks of which one is f times slower is the sum of their speeds: n / (n - 1 + 1
/ f) times the healthy step.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from bench.emulation.emulated_cluster import EmulatedCluster
from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import Plan
from meshwright.train.measured_runs import TrialRunner
from meshwright.train.metrics import agree_on_step
from meshwright.train.model import build_model
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.straggler import StragglerMonitor
from meshwright.train.trainer import Trainer, parallelize

FACTORS = (1.5, 2.0, 4.0)
QUIET_STEPS, SLOW_STEPS, BACK_STEPS = 22, 50, 30
HEALTHY, HEALTHY_STEPS = 10, 22
"""Runs in which nobody is slow, and the steps of each: a watch that has heard nothing before, and must say nothing."""

SETTLED = 8
"""Steps at the end of a part whose median counts."""


def slowed(there: EmulatedCluster, rank: int, launch: LaunchSpec, ground: TrialRunner) -> list[dict[str, Any]]:
    """One row for each factor, the first with the alarms of healthy runs; all ranks call it."""
    found = list[dict[str, Any]]()
    for factor in FACTORS:
        plan = Plan(dp_shard=there.world, zero=1)
        model = build_model(launch.model, launch.workload.seed)
        trainer = parallelize(model, optimizer_factory(launch.workload.optimizer), plan, precision="fp32", clip=1.0)
        try:
            alarms = 0 if found else sum(_healthy(launch, ground, trainer) for _ in range(HEALTHY))
            found.append({**_one(there, rank, launch, ground, trainer, factor), "healthy_alarms": alarms})
        finally:
            trainer.close()
            groups = [
                one
                for group in trainer.mesh.groups.values()
                for one in group.process_groups
                if one is not dist.group.WORLD
            ]
            del trainer
            for group in groups:
                dist.destroy_process_group(group)
    return found


def _healthy(launch: LaunchSpec, ground: TrialRunner, trainer: Trainer) -> int:
    """What a run says in which nobody is slow: lines."""
    said = list[str]()
    watch = StragglerMonitor(trainer.plan, launch.workload.batch, said.append)
    for step in range(HEALTHY_STEPS):
        record = trainer.step(LocalBatch(_rows(ground, trainer, step), ground.loader.labels_per_step))
        _, _, phases, _ = agree_on_step(record, (0.0,), trainer.mesh.world)
        assert phases is not None
        watch.heed(phases, step + 1, balance=False)
    return len(said)


def _one(
    there: EmulatedCluster, rank: int, launch: LaunchSpec, ground: TrialRunner, trainer: Trainer, factor: float
) -> dict[str, Any]:
    victim, said = there.world - 1, list[str]()
    share = there.scaled.shares[victim]
    watch = StragglerMonitor(trainer.plan, launch.workload.batch, said.append)
    seconds, plans = list[float](), list[str]()
    for step in range(QUIET_STEPS + SLOW_STEPS + BACK_STEPS):
        if rank == victim and step in (QUIET_STEPS, QUIET_STEPS + SLOW_STEPS):
            there.shares.change(victim, share / factor if step == QUIET_STEPS else share)
        record = trainer.step(LocalBatch(_rows(ground, trainer, step), ground.loader.labels_per_step))
        record, _, phases, _ = agree_on_step(record, (0.0,), trainer.mesh.world)
        assert phases is not None
        seconds.append(record.seconds)
        trainer.plan = watch.heed(phases, step + 1, balance=True) or trainer.plan
        plans.append(trainer.plan.name)
    changed = [step for step in range(1, len(plans)) if plans[step] != plans[step - 1]]
    during = [step for step in changed if QUIET_STEPS <= step < QUIET_STEPS + SLOW_STEPS]
    after = [step for step in changed if step >= QUIET_STEPS + SLOW_STEPS]
    healthy = statistics.median(seconds[QUIET_STEPS - SETTLED : QUIET_STEPS])
    waiting = seconds[QUIET_STEPS + 1 : during[0]] if during else seconds[QUIET_STEPS + 1 : QUIET_STEPS + SLOW_STEPS]
    end = QUIET_STEPS + SLOW_STEPS
    return {
        "factor": factor,
        "alarms": sum(step < QUIET_STEPS for step in changed),
        "found": during[0] - QUIET_STEPS + 1 if during else None,
        "back": after[0] - end + 1 if after else None,
        "healthy": healthy,
        "slow": statistics.median(waiting),
        "adjusted": statistics.median(seconds[end - SETTLED : end]),
        "optimum": healthy * there.world / (there.world - 1 + 1 / factor),
        "plan": plans[end - 1],
        "said": said,
    }


def _rows(ground: TrialRunner, trainer: Trainer, step: int) -> list[dict[str, torch.Tensor]]:
    ranges = micro_batch_rows(trainer.plan, ground.launch.workload.batch, trainer.mesh.replica)
    return [ground.loader.rows(step, first, size) for first, size in ranges]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    lines = [
        "## A rank that slows down and recovers",
        "",
        "| slower | found after | healthy step | slowed | adjusted | optimum reached | back after | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, back = (f"{row[name]} steps" if row[name] else "not" for name in ("found", "back"))
        times = " | ".join(f"{1e3 * row[name]:.0f} ms" for name in ("healthy", "slow", "adjusted"))
        lines.append(
            f"| {row['factor']} | {found} | {times} | {row['optimum'] / row['adjusted']:.0%} | {back} | {row['plan']} |"
        )
    alarms, healthy = (sum(row[name] for row in rows) for name in ("alarms", "healthy_alarms"))
    return [
        *lines,
        "",
        f"False alarms in {HEALTHY} healthy runs of {HEALTHY_STEPS} steps: {healthy}; in the {QUIET_STEPS} steps "
        f"before each slowdown: {alarms}.",
        "",
    ]
