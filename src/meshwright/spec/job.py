"""Defines a job, the input of the planner: model, cluster and workload, the data, and the fields of the plan that the
user fixed."""

from __future__ import annotations

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import Workload


class Job(StrictModel):
    """The job to plan. `pins` are fields of `Plan` that the user fixed."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload = Workload()
    pins: dict[str, int | str | bool | tuple[int, ...] | tuple[str, ...]] = Field(default_factory=dict)
