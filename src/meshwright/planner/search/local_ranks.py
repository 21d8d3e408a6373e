"""Chooses the number of ranks of the cluster `local` on a machine without accelerators: the number with which the
planner finds the fastest plan. More ranks share the work, but their communication takes time, and more ranks than cores
share the cores. The numbers are compared with the rates of the catalog, because `probe` measures only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.core.errors import InputError
from meshwright.planner.inputs.cluster_parser import MAX_CPU_RANKS, available_cpus, cuda_device_names, read_cluster
from meshwright.planner.inputs.job import JobFile, resolve_job
from meshwright.planner.search.best_plans import SearchObjective
from meshwright.planner.search.ranking import rank_plans, search_cluster_sizes


def with_local_ranks(file: JobFile, pins: Mapping[str, Any]) -> JobFile:
    """Returns the job with the number of ranks of `local`. A plan by name determines it; otherwise it is that of the
    fastest plan with `pins`. If no number up to that of the cores has a plan, it is the smallest that has one: the
    estimates do not apply to ranks that share a core. The job is returned unchanged
    if it names another cluster or a number, if this machine has CUDA devices, or if no number has a plan."""
    if not file.cluster.is_open_local or cuda_device_names():
        return file
    try:
        plan = file.given_plan()
    except InputError:
        return file  # the command refuses it
    if plan is not None:
        return with_ranks(file, plan.world) if plan.world <= MAX_CPU_RANKS else file
    cores = min(available_cpus(), MAX_CPU_RANKS)
    crowded = (count for count in range(cores + 1, MAX_CPU_RANKS + 1) if _fastest(file, [count], pins))
    found = _fastest(file, range(1, cores + 1), pins) or next(crowded, 0)
    return with_ranks(file, found) if found else file


def with_ranks(file: JobFile, count: int) -> JobFile:
    """Returns the job with `count` ranks of `local`."""
    return file.model_copy(update={"cluster": file.cluster.model_copy(update={"local_ranks": count})})


def _fastest(file: JobFile, counts: Iterable[int], pins: Mapping[str, Any]) -> int:
    """Returns the number of ranks with the fastest plan, 0 if no number has a plan that fits."""
    times: list[tuple[float, int]] = []
    for count in counts:
        try:
            job = resolve_job(with_ranks(file, count))
            rates = read_cluster(f"local:{count}", measured=False)
            rates = rates.with_memory(file.cluster.memory) if file.cluster.memory else rates
            job = job.but(cluster=job.cluster.but(groups=rates.groups), pins={**job.pins, **pins})
            found = search_cluster_sizes(job, 1, SearchObjective.fastest, True, float("inf"))
            best, _ = rank_plans(job, found, 1, SearchObjective.fastest, True)
        except InputError:
            continue
        times += [(entry.estimate.time.step, count) for entry in best]
    return min(times, default=(0.0, 0))[1]
