"""When nothing fits: the nearest plan, what fills it, and the smallest change with which a plan would fit."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.errors import InputError, NothingFits
from meshwright.base.units import show_bytes
from meshwright.cost.step import estimate_of
from meshwright.search.survey import Survey, survey
from meshwright.spec.estimate import Memory
from meshwright.spec.job import Job

MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def nothing_fits(found: Survey) -> NothingFits | InputError:
    """The error to raise: InputError when not one plan is legal, else NothingFits."""
    job, nearest = found.pricer.setting.job, list(found.ranking.nearest.values())
    if not nearest:
        reasons = "; ".join(f"{it.example} ({it.count} plans)" for it in found.space.refused.values())
        return InputError(f"no plan is legal: {reasons or 'the pins leave none'}")
    candidate = min(nearest, key=lambda it: it.reserved)
    memory = estimate_of(found.pricer, candidate.alone)
    stage = max(range(len(memory.per_stage)), key=lambda at: memory.per_stage[at].total)
    rank = stage * (job.cluster.devices // candidate.box.pp)
    kind, size = largest_kind(memory.memory)
    return NothingFits(
        f"no plan fits: the nearest ({candidate.plan.name}) needs {show_bytes(candidate.reserved)} on rank {rank} "
        f"of {show_bytes(found.pricer.setting.device.memory)}; {kind} are {show_bytes(size)} of it; {way_out(job)}"
    )


def largest_kind(memory: Memory) -> tuple[str, float]:
    """The kind of memory that takes most, in the words of a sentence."""
    kind = max(KINDS, key=lambda name: getattr(memory, name))
    return ("optimizer states" if kind == "optimizer" else kind), getattr(memory, kind)


def way_out(job: Job) -> str:
    """The smallest change with which a plan fits, tried one by one."""
    for words, changed in changes(job):
        try:
            best = survey(changed, 1).ranking.best
        except InputError:
            continue
        if best:
            return f"{words} would fit ({best[0].plan.name})"
    return "not even 64 times the nodes or 1/16 of the sequence would fit: use devices with more memory"


def changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Jobs beside `job`, the smaller changes first: a pin less, more nodes, a shorter sequence."""
    for name, value in job.pins.items():
        yield f"without the pin {name}={value}", job.but(pins={other: kept for other, kept in job.pins.items() if other != name})
    for times in MULTIPLES:
        groups = tuple(group.but(nodes=group.nodes * times) for group in job.cluster.groups)
        cluster = job.cluster.but(groups=groups)
        yield f"{sum(group.nodes for group in groups)} nodes ({cluster.devices} devices)", job.but(cluster=cluster)
    for part in (2, 4, 8, 16):
        sequence = job.workload.sequence // part
        if sequence:
            yield f"sequence {sequence}", job.but(workload=job.workload.but(sequence=sequence))
