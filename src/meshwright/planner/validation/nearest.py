"""Finds the published runs that are most similar to a plan, so that a user can see how far the estimate is from
anything that was measured.

The distance between a plan and a run is the length of a vector. Its items are the differences of log2 of the number of
parameters, the devices, tp, pp, cp, ep, the sequence length and the tokens per device and step, so a factor of two in
one of them is a distance of 1. A different device, a different ZeRO stage and a different recompute kind are items of 1
each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2, sqrt
from typing import NamedTuple

from meshwright.core.messages import Message
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.planner.search.best_plans import SearchResult
from meshwright.planner.validation.tables import MeasurementRow, read_measurements
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

NEAREST_RUNS = 3


class NearestRun(NamedTuple):
    """A published run and its distance."""

    row: MeasurementRow
    distance: float


def nearest_runs(
    job: Job, plan: Plan, rows: Iterable[MeasurementRow] | None = None, count: int = NEAREST_RUNS
) -> list[NearestRun]:
    """Returns the `count` runs with the least distance among `rows`, by default the package's table. Of runs that
    differ only in their result, the first is returned. Rows that state too little are omitted."""
    wanted, kinds = _plan_sizes(job, plan), _plan_kinds(job, plan)
    found: dict[tuple[object, ...], NearestRun] = {}
    nearest: list[float] = []  # the `count` least distances so far
    for row in read_measurements() if rows is None else rows:
        if row.text("status") != "ok" or not (row.text("step_time_s") or row.text("tokens_per_s_per_gpu")):
            continue
        devices = row.count("gpus", 0)
        if devices <= 0 or (len(nearest) == count and abs(log2(wanted[1] / devices)) > nearest[-1]):
            continue
        sizes = _row_sizes(row)
        if min(sizes) > 0:
            theirs = _row_kinds(row)
            other = [float(mine != their) for mine, their in zip(kinds, theirs, strict=True)]
            squares = [log2(mine / their) ** 2 for mine, their in zip(wanted, sizes, strict=True)]
            key = (row.text("family"), row.text("model"), *sizes, *theirs)
            if key not in found:
                found[key] = NearestRun(row, sqrt(sum(squares) + sum(other)))
                nearest = sorted([*nearest, found[key].distance])[:count]
    return sorted(found.values(), key=lambda each: each.distance)[:count]


def _plan_sizes(job: Job, plan: Plan) -> tuple[float, ...]:
    devices = job.cluster.devices
    tokens = job.workload.tokens / devices
    degrees = (plan.tp, plan.pp, plan.cp, plan.ep)
    return (job.model.parameters, devices, *degrees, job.workload.sequence, tokens)


def _row_sizes(row: MeasurementRow) -> tuple[float, ...]:
    devices, sequence = row.count("gpus", 0), row.count("seq", 0)
    parameters = 1e9 * (row.number("params_b") or 0.0) or 12.0 * row.count("layers", 0) * row.count("hidden", 0) ** 2
    batch = row.count("global_batch", 0) or row.count("micro_batch", 0) * row.count("dp", 0)
    degrees = (row.count(name) for name in ("tp", "pp", "cp", "ep"))
    return (parameters, devices, *degrees, sequence, batch * sequence / max(devices, 1))


def _plan_kinds(job: Job, plan: Plan) -> tuple[str, str, str]:
    return job.cluster.groups[0].device.name.split("-")[0], str(plan.zero), str(plan.recompute)


def _row_kinds(row: MeasurementRow) -> tuple[str, str, str]:
    recompute = {"selective": "attn"}.get(row.text("activation_ckpt"), row.text("activation_ckpt")) or "none"
    return row.text("gpu").lower().rstrip("?").split("-")[0], str(row.count("zero_stage", 0)), recompute


def trust_messages(job: Job, answer: SearchResult) -> list[Message]:
    """Returns what is known about the error of the chosen plan: the intervals, the features that no published run has,
    and the nearest published runs. Returns nothing for CPU ranks, which no published table contains."""
    plan, priced = answer.chosen.plan, answer.chosen.estimate
    if priced.step_interval is None:
        return []
    said = [_interval_message(priced)]
    missing = unmeasured_features(job.cluster, plan)
    if missing:
        said.append(
            Message(
                "no published run has {features}: such plans rank by a step time raised by 5% for each (--trust "
                "measured leaves them out)",
                features=missing,
            )
        )
    return [*said, _nearest_message(nearest_runs(job, plan))]


def _interval_message(priced: Estimate) -> Message:
    step, memory = priced.step_interval, priced.memory_interval
    assert step is not None and memory is not None
    return Message(
        "interval of nine of ten published runs: step {low:seconds} to {high:seconds}; allocated memory {least:bytes} "
        "to {most:bytes}",
        low=step.low,
        high=step.high,
        least=memory.low,
        most=memory.high,
    )


def _nearest_message(found: Sequence[NearestRun]) -> Message:
    return Message(
        "nearest published runs (a distance of 1 is a factor of two in one size): {runs}",
        runs=tuple(
            Message(
                "{model} on {devices:count device} of {device} at {distance}, {system}",
                model=each.row.text("model"),
                devices=each.row.count("gpus"),
                device=each.row.text("gpu"),
                distance=f"{each.distance:.1f}",
                system=each.row.text("system"),
            )
            for each in found
        ),
    )


def nearest_data(job: Job, plan: Plan) -> list[dict[str, object]]:
    """Returns the nearest published runs as JSON data."""
    columns = ("row_id", "system", "model", "gpu", "gpus", "tp", "pp", "cp", "ep", "dp", "source_ref")
    return [
        {"distance": each.distance, **{name: each.row.text(name) for name in columns}}
        for each in nearest_runs(job, plan)
    ]
