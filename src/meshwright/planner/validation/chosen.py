"""Compares the plans that the planner chooses with the best published runs, for `meshwright validate --chosen`.

The job of a comparison is that of the largest published model for each device, precision and number of devices. The
measure is model FLOPs utilization (MFU): the FLOPs of the model per second divided by the peak rate of the devices. The
best published MFU is the highest measured value on the same device and precision, on half to twice as many devices. A
choice can be better than every published run. But if its predicted MFU is higher than the best published one, and the
low end of its interval is higher too, then the prediction is not credible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.core.errors import MeshwrightError
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.validation.score import StepPrediction, core_rows
from meshwright.spec.plan import Plan

MIN_DEVICES = 8
"""Runs on fewer devices are not compared."""


class PublishedRun(NamedTuple):
    """A published run: device, precision, number of devices, and measured MFU."""

    device: str
    precision: str
    devices: int
    mfu: float
    prediction: StepPrediction


class ChosenPlan(NamedTuple):
    """The planner's choice for the job of `run`. `mfu` is its predicted MFU, `low` the MFU at the slow end of the
    interval of its step time, and `best` the published run with the highest MFU at this scale."""

    run: PublishedRun
    plan: Plan
    mfu: float
    low: float
    best: PublishedRun

    @property
    def verdict(self) -> str:
        """Returns whether the choice is at most as good as the best published run: `below`, `interval` if only the low
        end of its interval is, or `above`."""
        return "below" if self.mfu <= self.best.mfu else "interval" if self.low <= self.best.mfu else "above"


def published_runs(found: Sequence[StepPrediction]) -> list[PublishedRun]:
    """Returns the published runs with a measured step time on at least MIN_DEVICES devices."""
    runs = []
    for each in core_rows(found):
        job, seconds = each.case.job, each.case.seconds
        if seconds and job.cluster.devices >= MIN_DEVICES:
            mfu = each.estimate.mfu * each.seconds / seconds
            device = job.cluster.groups[0].device.name
            runs.append(PublishedRun(device, each.case.row.text("prec_class"), job.cluster.devices, mfu, each))
    return runs


def chosen_plans(found: Sequence[StepPrediction]) -> list[ChosenPlan]:
    """Returns the comparisons for the runs of `found`, by device, precision and number of devices. Jobs for which no
    plan fits are omitted."""
    runs = published_runs(found)
    largest: dict[tuple[str, str, int], PublishedRun] = {}
    for run in runs:
        known = largest.get(run[:3])
        if known is None or _parameters(known) < _parameters(run):
            largest[run[:3]] = run
    choices = []
    for run in (largest[key] for key in sorted(largest)):
        try:
            chosen = search_plans(run.prediction.case.job, 1).chosen
        except MeshwrightError:
            continue
        estimate, interval = chosen.estimate, chosen.estimate.step_interval
        low = estimate.mfu * estimate.time.step / interval.high if interval else estimate.mfu
        near = [each for each in runs if each[:2] == run[:2] and run.devices / 2 <= each.devices <= 2 * run.devices]
        choices.append(ChosenPlan(run, chosen.plan, estimate.mfu, low, max(near, key=lambda each: each.mfu)))
    return choices


def _parameters(run: PublishedRun) -> int:
    return run.prediction.case.job.model.parameters
