"""What fits: the largest model for a number of devices under each strategy, and the smallest cluster for a model.

Memory is the whole question here, so plans are those that need least of it: one sequence a pass and a device, layers
recomputed. A model fits
when it fits with a margin, not only tightly. Sizes are those of `intake.generic`, searched to one percent: a larger
model needs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.sized_model import MIN_PARAMETERS, SizesByName, scalable_sizes, sizes_for_parameters
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
"""Pins of every strategy: what takes least memory. Plans are those that this version runs, with nothing in host
memory."""
SIZE_TOLERANCE = 1.01
MAX_NODES = 4096


class LargestModel(StrictModel):
    """The largest model of a strategy on so many devices, and the plan that holds it."""

    strategy: str
    devices: int
    parameters: int
    plan: str
    reserved: float = Field(description="bytes on the peak rank")


class SmallestCluster(StrictModel):
    """The fewest devices on which a model fits under a strategy; 0 devices where no number of them is enough."""

    strategy: str
    devices: int
    nodes: int
    plan: str = ""
    reserved: float = 0.0
    floor: float = Field(default=0.0, description="bytes that every rank stores on any number of devices")


def split_by_node_type(cluster: Cluster) -> list[Cluster]:
    """Each kind of node by itself, with all nodes of its kind."""
    found: list[NodeGroup] = []
    for group in cluster.groups:
        at = next(
            (at for at, known in enumerate(found) if (known.device, known.devices) == (group.device, group.devices)),
            len(found),
        )
        found[at : at + 1] = [found[at].but(nodes=found[at].nodes + group.nodes) if at < len(found) else group]
    return [cluster.but(groups=(group,)) for group in found]


def sub_cluster(cluster: Cluster, devices: int) -> Cluster:
    """So many devices of a cluster of one kind of node, as few nodes as they need."""
    group = cluster.groups[0]
    nodes, each = (1, devices) if devices <= group.devices else (devices // group.devices, group.devices)
    return cluster.but(name=f"{nodes}x{each}:{group.device.name}", groups=(group.but(nodes=nodes, devices=each),))


def device_counts(cluster: Cluster) -> list[int]:
    """Numbers of devices that a chart has: powers of two inside a node, then whole nodes doubled, and all."""
    group = cluster.groups[0]
    inside = [1 << power for power in range(group.devices.bit_length()) if 1 << power < group.devices]
    nodes = [1 << power for power in range(group.nodes.bit_length()) if 1 << power < group.nodes]
    return [*inside, *(count * group.devices for count in nodes), group.nodes * group.devices]


def strategy_job(strategy: str, model: ModelSpec, cluster: Cluster, workload: Workload) -> Job:
    """One sequence for every device, under the pins of the strategy."""
    pins = {**LOWEST_MEMORY_PINS, **STRATEGIES[strategy]}
    return Job(model=model, cluster=cluster, workload=workload.but(batch=cluster.devices), pins=pins)


def fit_with_margin(job: Job) -> LargestModel | None:
    """The plan of `job` that fits with a margin; None where none does."""
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
    """What a rank holds for each parameter of the model at least. Source: Rajbhandari et al., ZeRO, section 3.1."""
    precision = workload.recipe
    states = precision.master + workload.optimizer.states * workload.optimizer.state_bytes(precision.state_size)
    shards = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, devices), "ZeRO-2": (1, devices, devices)}.get(
        strategy, (devices,) * 3
    )
    return precision.size / shards[0] + precision.gradient_size / shards[1] + states / shards[2]


def largest_model(
    strategy: str, cluster: Cluster, workload: Workload, known: SizesByName, least: float = MIN_PARAMETERS
) -> LargestModel | None:
    """The largest model of any size that fits, by halving the range of sizes from `least`. None where not even that one
    does."""

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
    """Every strategy on every number of devices, where anything fits. The last strategy, all plans, holds what any
    before it holds."""
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
    """The fewest devices of this kind of node: the first of a chart's numbers that is enough, then the fewest whole
    nodes."""
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
