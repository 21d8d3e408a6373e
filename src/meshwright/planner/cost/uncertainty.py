"""States how far an estimate can be from a measurement, and which features of a plan have never been measured in
public.

Both come from the published measurements of `meshwright validate`; `catalog/accuracy.json` has the figures
(planner/validation/intervals.py computes them). Let e be log(measured / predicted). A plan has features between 0 and
1, such as 'experts'. The scale of the error of a plan is a sum over its features:

    scale = sum of feature x mean |e| that the feature adds
    interval = predicted x exp(low x scale) ... predicted x exp(high x scale)

`low` and `high` are the 5 % and the 95 % quantiles of e / scale. Each unmeasured feature adds the scale of the feature
'plan', which is 1 for all plans. The feature 'short passes' is the fraction of the time that a layer needs for a
micro-batch that PASS_OVERHEAD_SECONDS would take: overheads that the cost model omits have a size of their own, so they
matter most if passes are short.

A feature of a plan is measured if at least one published run with a measured step time has it. Features that a run
cannot avoid, such as the kind of device, do not count, because they are equal for all plans of a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import exp
from typing import Any, NamedTuple

import numpy as np

from meshwright.catalog import read as catalog
from meshwright.core.messages import Message, term
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import Interval
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

PASS_OVERHEAD_SECONDS = 5e-3
"""Seconds of a layer's forward and backward of a micro-batch that the cost model may omit. With pipelines across nodes,
runs of the Ultra-Scale table took at least this time longer per layer than predicted (docs/en/accuracy.md)."""


class ErrorScale(NamedTuple):
    """The scale of the error by feature, and the quantiles of the error divided by its scale: (low, high) by the name
    of a set of plans."""

    features: dict[str, float]
    quantiles: dict[str, tuple[float, float]]

    def interval(self, value: float, features: Mapping[str, float], of: str, unmeasured: int = 0) -> Interval:
        """Returns the interval around `value` for a plan with `features`, among the plans `of`."""
        scale = sum(self.features[name] * size for name, size in features.items())
        scale += unmeasured * self.features["plan"]
        low, high = self.quantiles[of]
        return Interval(low=value * exp(min(low * scale, 0.0)), high=value * exp(max(high * scale, 0.0)))


@cache
def error_scale(quantity: str) -> ErrorScale:
    """Returns the error scale of `quantity`: time or memory."""
    data = catalog.accuracy()[quantity]
    return ErrorScale(data["scale"], {name: (low, high) for name, (low, high) in data["quantiles"].items()})


def time_features(job: Job, plan: Plan, seconds: float) -> dict[str, float]:
    """Returns the features of the error of a step time. `seconds` is the predicted step time."""
    passes = job.workload.batch / (plan.dp * plan.micro_batch) * max(job.model.blocks, 1) / plan.pp
    short = min(PASS_OVERHEAD_SECONDS * passes / seconds, 1.0)
    return {
        "plan": 1.0,
        "tensor ranks on several nodes": float(plan.tp > max(group.devices for group in job.cluster.groups)),
        "experts": float(plan.ep > 1),
        "short passes": short,
        "short passes with a pipeline": short * (plan.pp > 1),
    }


def memory_features(plan: Plan) -> dict[str, float]:
    """Returns the features of the error of the memory."""
    return {"plan": 1.0, "tensor": float(plan.tp > 1), "pipeline": float(plan.pp > 1)}


def cluster_extent(nodes: int) -> str:
    """Returns the set of plans for the quantiles of the step time: those on one node, or those on several nodes."""
    return "one node" if nodes == 1 else "several nodes"


def step_interval(setting: CostContext, plan: Plan, seconds: float) -> Interval | None:
    """Returns the interval in which nine of ten measured step times lie, or None for CPU ranks, which no published
    table contains."""
    if setting.on_host:
        return None
    nodes = sum(group.nodes for group in setting.job.cluster.groups)
    return error_scale("time").interval(
        seconds,
        time_features(setting.job, plan, seconds),
        cluster_extent(nodes),
        len(unmeasured_features(setting.job.cluster, plan)),
    )


def memory_interval(setting: CostContext, plan: Plan, allocated: float) -> Interval:
    """Returns the interval in which nine of ten measured peaks of allocated bytes lie. Memory of CPU ranks is exact."""
    if setting.on_host:
        return Interval(low=allocated, high=allocated)
    return error_scale("memory").interval(allocated, memory_features(plan), "plans")


# --- features that no published run has

ZERO_WITH_PIPELINE = "zero with a pipeline"
"""The ZeRO stage of a plan with several pipeline ranks."""


def is_trusted(job: Job, field: str, value: Any) -> bool:
    """Returns whether the job allows the value `value` of a plan field: any value, or with `trust` measured only values
    of published runs. Fields that the published runs do not distinguish allow
    all values."""
    return job.trust == "all" or is_on_host(job.cluster) or is_measured(field, value)


@cache
def is_measured(field: str, value: Any) -> bool:
    """Returns whether a published run has the value `value` of the field `field`, or the field does not matter.

    >>> is_measured("schedule", "1f1b"), is_measured("recompute", "sac"), is_measured("tp", 3)
    (True, False, True)
    """
    known = catalog.accuracy()["measured"].get(field)
    return known is None or _text(value) in known


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def is_on_host(cluster: Cluster) -> bool:
    """Returns whether ranks are CPU processes. Published runs are on accelerators, so they say nothing about them."""
    return any(group.device.name.lower().startswith("cpu") for group in cluster.groups)


def feature_values(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Returns the values of a plan by field, for the fields that published runs distinguish. A field without an effect
    is omitted, such as the schedule of a plan with one stage."""
    kinds = (plan.recompute, plan.recompute_rest) if plan.recompute_layers else (plan.recompute,)
    found: dict[str, tuple[str, ...]] = {"recompute": tuple(dict.fromkeys(map(str, kinds)))}
    if plan.pp > 1:
        found |= {"schedule": (str(plan.schedule),), ZERO_WITH_PIPELINE: (str(plan.zero),)}
    if plan.cp > 1:
        found["context"] = (str(plan.context),)
    return {**found, "axes": (_text(plan.axes),)}


def unmeasured_features(cluster: Cluster, plan: Plan) -> tuple[Message, ...]:
    """Returns the features of a plan that no published run has. Offload is not among them: its link is a risk of its
    own (`uses_unmeasured_link` in search/best_plans.py). On CPU ranks the result is empty."""
    if is_on_host(cluster):
        return ()
    return tuple(
        Message("{field} {value}", field=term("feature", field), value=value)
        for field, values in feature_values(plan).items()
        for value in values
        if not is_measured(field, value)
    )


def unmeasured_counts(cluster: Cluster, box: PlanGrid) -> Array:
    """Returns the number of unmeasured features of each plan of `box`, over the axes `obsczf` of GRID_AXES; axes
    without an effect have length 1.

    Guarantees: equal to len(unmeasured_features(cluster, plan)) for each plan of the grid.
    """
    if is_on_host(cluster):
        return np.zeros((1,) * 6)
    missing = lambda field, value: float(not is_measured(field, value))
    kinds = [{choice.kind, choice.rest} if choice.some else {choice.kind} for choice in box.recompute]
    found = broadcast_to_axis([sum(missing("recompute", kind) for kind in each) for each in kinds], "c")
    found = found + missing("axes", box.layout.axes)
    found = found + broadcast_to_axis(
        [float(each.cp > 1) * missing("context", each.context) for each in box.micro_batches], "b"
    )
    if box.pp > 1:
        found = found + broadcast_to_axis([missing("schedule", order.schedule) for order in box.orders], "o")
        found = found + broadcast_to_axis([missing(ZERO_WITH_PIPELINE, each.zero) for each in box.shards], "z")
    return np.asarray(found[0])
