"""What this version can plan but not train: devices without a backend, models without a reference model, and parts of
plans. The planner marks such plans as plan-only, and `train` and `launch` refuse them."""

from __future__ import annotations

from meshwright.catalog import read as catalog
from meshwright.core.messages import Message
from meshwright.spec.cluster import Cluster
from meshwright.spec.constraints import unsupported_parts
from meshwright.spec.job import Job
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan

TRAINABLE_VENDORS = ("nvidia", "amd", "host")
"""The vendors, by the names of catalog files, whose devices torch trains on with its CUDA or CPU device type
(runtime/backend.py)."""


def untrainable_part(model: ModelSpec, cluster: Cluster) -> Message | str | None:
    """Returns why this version cannot train `model` or use the devices of `cluster`, or None if it can."""
    return model.against_training or _untrainable_devices(cluster)[1]


def plan_only_reasons(job: Job, plan: Plan) -> list[Message]:
    """Returns why this version cannot train `job` under `plan`, a line for each reason; empty if it can."""
    if (fault := untrainable_part(job.model, job.cluster)) is not None:
        return [Message("plan-only: {fault}", fault=fault)]
    return [
        Message("plan-only: this version does not run {part} yet", part=part)
        for part in unsupported_parts(plan, job.workload.recipe)
    ]


def plan_only_parts(job: Job, plan: Plan) -> tuple[str, ...]:
    """Returns the names of what this version cannot train: the model, devices, or parts of the plan."""
    model = (job.model.name,) if job.model.against_training else ()
    return (*model, *_untrainable_devices(job.cluster)[0], *unsupported_parts(plan, job.workload.recipe))


def _untrainable_devices(cluster: Cluster) -> tuple[list[str], Message | None]:
    """Returns the names of the devices of `cluster` that this version cannot train on, and the reason, or ([], None).
    It has no backend for some vendors, and the collective libraries of several vendors do not connect. Devices that the
    catalog does not have are trusted."""
    rows = catalog.devices()
    vendors = {row["vendor"]: row["name"] for group in cluster.groups if (row := rows.get(group.device.name))}
    if wrong := [name for vendor, name in vendors.items() if vendor not in TRAINABLE_VENDORS]:
        return wrong, Message(
            "{devices} can be planned for but not trained on: training runs on NVIDIA and AMD GPUs and on CPUs; name "
            "one of these in --cluster",
            devices=", ".join(wrong),
        )
    if len(vendors) > 1:
        names = [*vendors.values()]
        return names, Message(
            "{devices} in one job can be planned but not trained: they have no common collective library",
            devices=", ".join(names),
        )
    return [], None
