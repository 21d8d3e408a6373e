"""Finds the largest model that fits on a number of devices under each strategy, and the smallest cluster for a model.
`meshwright fit` prints both.

Only memory matters for this question, so only plans with low memory are searched: one sequence per micro-batch and
device, and full recompute. A plan that fits only without its safety margin (a tight plan) does not count.
`sizes_for_parameters` in inputs/model_parser.py creates a model for each number of parameters. Memory grows with this
number, so bisection finds the largest model within 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.model_parser import MIN_PARAMETERS, SizesByName, scalable_sizes, sizes_for_parameters
from meshwright.planner.search.branch_and_bound import find_best_plan
from meshwright.spec.cluster import Cluster, NodeGroup
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import Workload

ANY_PLAN = "any plan"
DATA_PARALLEL_PINS: Mapping[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "DDP": {**DATA_PARALLEL_PINS, "zero": 0},
    "ZeRO-1": {**DATA_PARALLEL_PINS, "zero": 1},
    "ZeRO-2": {**DATA_PARALLEL_PINS, "zero": 2},
    "ZeRO-3": {**DATA_PARALLEL_PINS, "zero": 3},
    ANY_PLAN: {"schedule": "1f1b"},
}
LOWEST_MEMORY_PINS: Mapping[str, Any] = {"micro_batch": 1, "recompute": "full", "offload": ()}
"""The pins that all strategies share: the choices with the lowest memory, without offload."""
SIZE_TOLERANCE = 1.01
MAX_NODES = 4096


class LargestModel(StrictModel):
    """The largest model that fits on `devices` devices under a strategy, and the plan with which it fits."""

    strategy: str
    devices: int
    parameters: int
    plan: str
    reserved: float = Field(description="bytes of memory reserved on the peak rank")


class SmallestCluster(StrictModel):
    """The fewest devices on which a model fits under a strategy. `devices` is 0 if the model fits on no tested number
    of devices."""

    strategy: str
    devices: int
    nodes: int
    plan: str = ""
    reserved: float = 0.0
    floor: float = Field(default=0.0, description="bytes that every rank stores for any number of devices")


def split_by_node_type(cluster: Cluster) -> list[Cluster]:
    """Returns one cluster for each type of node, with all nodes of this type."""
    found: list[NodeGroup] = []
    for group in cluster.groups:
        at = next(
            (at for at, known in enumerate(found) if (known.device, known.devices) == (group.device, group.devices)),
            len(found),
        )
        found[at : at + 1] = [found[at].but(nodes=found[at].nodes + group.nodes) if at < len(found) else group]
    return [cluster.but(groups=(group,)) for group in found]


def sub_cluster(cluster: Cluster, devices: int) -> Cluster:
    """Returns `devices` devices of a cluster with one type of node, on as few nodes as possible."""
    group = cluster.groups[0]
    nodes, each = (1, devices) if devices <= group.devices else (devices // group.devices, group.devices)
    return cluster.but(name=f"{nodes}x{each}:{group.device.name}", groups=(group.but(nodes=nodes, devices=each),))


def device_counts(cluster: Cluster) -> list[int]:
    """Returns the numbers of devices for a chart in ascending order: 1, 2, 4, ... devices of one node, then the devices
    of 1, 2, 4, ... nodes, and all devices."""
    group = cluster.groups[0]
    inside = [1 << power for power in range(group.devices.bit_length()) if 1 << power < group.devices]
    nodes = [1 << power for power in range(group.nodes.bit_length()) if 1 << power < group.nodes]
    return [*inside, *(count * group.devices for count in nodes), group.nodes * group.devices]


def strategy_job(strategy: str, model: ModelSpec, cluster: Cluster, workload: Workload) -> Job:
    """Returns the job whose batch is one sequence per device and whose pins are those of the strategy and
    LOWEST_MEMORY_PINS."""
    pins = {**LOWEST_MEMORY_PINS, **STRATEGIES[strategy]}
    return Job(model=model, cluster=cluster, workload=workload.but(batch=cluster.devices), pins=pins)


def fit_with_margin(job: Job) -> LargestModel | None:
    """Returns the best plan of `job` as a `LargestModel`. Returns None if no plan is legal, or if the best plan does
    not fit with a safety margin. The field `strategy` of the result is empty."""
    try:
        found = find_best_plan(job, runnable=True)
    except InputError:
        return None
    if found is None or found.tight:
        return None
    return LargestModel(
        strategy="",
        devices=job.cluster.devices,
        parameters=job.model.parameters,
        plan=found.plan.name,
        reserved=found.reserved,
    )


def bytes_per_parameter(strategy: str, workload: Workload, devices: int) -> float:
    """Returns the minimum bytes of states (weights, gradients, optimizer) on a rank, divided by the number of
    parameters of the model. Source: Rajbhandari et al., ZeRO, section 3.1."""
    precision = workload.recipe
    states = precision.master + workload.optimizer.states * workload.optimizer.state_bytes(precision.state_size)
    shards = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, devices), "ZeRO-2": (1, devices, devices)}.get(
        strategy, (devices,) * 3
    )
    return precision.size / shards[0] + precision.gradient_size / shards[1] + states / shards[2]


def largest_model(
    strategy: str, cluster: Cluster, workload: Workload, known: SizesByName, least: float = MIN_PARAMETERS
) -> LargestModel | None:
    """Returns the largest model that fits on `cluster`, by bisection of the number of parameters. Returns None if a
    model with `least` parameters does not fit. `known` is the models that are scaled to other sizes."""

    def at(parameters: float) -> LargestModel | None:
        return fit_with_margin(
            strategy_job(strategy, model_spec("gpt", sizes_for_parameters(parameters, known)), cluster, workload)
        )

    low, high = least, cluster.memory / bytes_per_parameter(strategy, workload, cluster.devices)
    found = at(low)
    while found is not None and high / low > SIZE_TOLERANCE:
        middle = math.sqrt(low * high)
        larger = at(middle)
        if larger is None:
            high = middle
        else:
            low, found = middle, larger
    return found and found.but(strategy=strategy)


def fit_chart(cluster: Cluster, workload: Workload) -> Iterator[LargestModel]:
    """Yields the largest model for every strategy and number of devices. If no model fits, the pair of strategy and
    number of devices is omitted. The last strategy includes all plans, so its search starts from the largest model of
    the other strategies."""
    known = scalable_sizes()
    largest: dict[int, float] = {}
    for strategy in STRATEGIES:
        for devices in device_counts(cluster):
            part = sub_cluster(cluster, devices)
            least = largest.get(devices, MIN_PARAMETERS) / SIZE_TOLERANCE if strategy == ANY_PLAN else MIN_PARAMETERS
            found = largest_model(strategy, part, workload, known, max(least, MIN_PARAMETERS))
            if found is not None:
                largest[devices] = max(largest.get(devices, MIN_PARAMETERS), found.parameters)
                yield found


def smallest_cluster(strategy: str, model: ModelSpec, cluster: Cluster, workload: Workload) -> SmallestCluster:
    """Returns the fewest devices on which the model fits. All devices are on nodes of the first type in `cluster`. The
    numbers of `device_counts` are tested in ascending order. If the first number that fits spans several nodes,
    bisection then finds the smallest number of nodes."""
    each = cluster.groups[0].devices
    wide = cluster.but(groups=(cluster.groups[0].but(nodes=MAX_NODES),))
    floor = model.parameters * bytes_per_parameter(strategy, workload, MAX_NODES * each)

    def on(devices: int) -> LargestModel | None:
        return fit_with_margin(strategy_job(strategy, model, sub_cluster(wide, devices), workload))

    if floor > cluster.memory:
        return SmallestCluster(strategy=strategy, devices=0, nodes=0, floor=floor)
    least = model.parameters * bytes_per_parameter(strategy, workload, 1) / cluster.memory
    few = 0
    for devices in device_counts(wide):
        if strategy == ANY_PLAN and devices < least:
            few = devices
            continue
        found = on(devices)
        if found is None:
            few = devices
            continue
        low, high = few // each, devices // each
        while devices > each and high - low > 1:
            middle = (low + high) // 2
            fewer = on(middle * each)
            if fewer is None:
                low = middle
            else:
                high, found = middle, fewer
        return SmallestCluster(
            strategy=strategy,
            devices=found.devices,
            nodes=-(-found.devices // each),
            plan=found.plan,
            reserved=found.reserved,
            floor=floor,
        )
    return SmallestCluster(strategy=strategy, devices=0, nodes=0, floor=floor)
