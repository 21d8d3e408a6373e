"""A job is the question: model + cluster + workload, where its data is, and what the user fixed of the plan."""

from __future__ import annotations

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import Workload


class Job(StrictModel):
    """What is planned. `pins` are fields of `Plan` that the user fixed."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload = Workload()
    pins: dict[str, int | str | bool | tuple[int, ...] | tuple[str, ...]] = Field(default_factory=dict)
