"""When nothing fits: the nearest plan, what fills it, and the smallest changes with which a plan would fit, each with its numbers.

A change is tried by searching the changed job: a pin less, the loss in parts, a local disk, more nodes, a shorter sequence. More
recompute, a higher ZeRO stage and a smaller micro-batch need no trying: without a pin on them every plan of the space has been priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from math import ceil
from typing import NamedTuple

from meshwright.base.errors import InputError, NothingFits
from meshwright.base.units import parse_quantity
from meshwright.catalog import read as catalog
from meshwright.cost.constants import USABLE
from meshwright.cost.memory import ample
from meshwright.cost.setting import setting
from meshwright.cost.step import estimate, estimate_of
from meshwright.search import unlike
from meshwright.search.caution import cautious
from meshwright.search.ranking import Candidate
from meshwright.search.survey import Survey, first, quick
from meshwright.search.why_not import illegal
from meshwright.spec.cluster import MANY
from meshwright.spec.estimate import Fits
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.words.say import Sentence, say, tell
from meshwright.words.verdict import largest_kind

TRIED = 6
"""Numbers of nodes that are tried, from the first that could hold the states."""
PARTS = (2, 4, 8, 16)
CHUNKS = 8
"""Parts of the loss that are tried."""
LARGER = 4.0
"""Devices with more than so many times the memory are named only when nothing else helps."""
DISK = 2e9
"""Bytes a second of the disk that is tried where the cluster names none: an NVMe disk that many already have."""
MIB, GIB = 2.0**20, 2.0**30
LEAN = {"micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
"""What takes least memory, whatever else a plan has: fewer sequences, fewer activations, fewer micro-batches in flight."""


class NoPlanFits(NothingFits):
    """NothingFits that can be said in any language."""

    def __init__(self, sentence: Sentence, language: str = "en") -> None:
        super().__init__(say(sentence, language))
        self.sentence = sentence

    def said(self, language: str) -> NoPlanFits:
        """The same in another language."""
        return NoPlanFits(self.sentence, language)


def nothing_fits(found: Survey) -> NothingFits | InputError:
    """The error to raise: InputError when not one plan is legal, else NothingFits."""
    candidate = nearest(found)
    if candidate is None and found.fastest is not None:  # legal, but no host has room for what waits there
        notes = estimate_of(found.pricer, found.fastest.alone).notes
        return NothingFits(f"no plan fits: the nearest ({found.fastest.plan.name}) has no room on its host: {notes[-1]}")
    if candidate is None:
        return InputError(f"no plan is legal: {'; '.join(illegal(found)) or 'the pins leave none'}")
    job = found.pricer.setting.job
    priced = estimate_of(found.pricer, candidate.alone)
    stage = max(range(len(priced.per_stage)), key=lambda at: priced.per_stage[at].total)
    kind, size = largest_kind(priced.memory)
    return NoPlanFits(
        tell(
            "near.none",
            plan=candidate.plan.name,
            reserved=candidate.reserved,
            rank=stage * (job.cluster.devices // candidate.plan.pp),
            memory=job.cluster.budget or found.pricer.setting.device.memory,
            kind=kind,
            size=size,
            ways=tuple(ways(job, candidate, found.space.runnable)),
        )
    )


def nearest(found: Survey) -> Candidate | None:
    """The legal plan that needs least memory."""
    return found.least


def ways(job: Job, candidate: Candidate, runnable: bool = False) -> Iterator[Sentence]:
    """The smallest change of each kind with which a plan fits."""
    found = 0
    for kind in (pins_less, chunked, disks, more_nodes, shorter):
        for key, values, changed in kind(job):
            best = fastest(changed, runnable)
            if best is not None:
                yield tell(key, **values, plan=best.plan.name, seconds=best.seconds)
                found += 1
                break
    if candidate.reserved <= ample(setting(job)):
        yield tell("near.budget", memory=ceil(candidate.reserved / MIB) * MIB, plan=candidate.plan.name, seconds=candidate.seconds)
        return
    memory = ceil(candidate.reserved / USABLE / GIB) * GIB
    if not found or memory <= LARGER * job.cluster.memory:
        device = device_of(memory, job.cluster.groups[0].link.name)
        yield tell("near.device" if device else "near.memory", memory=memory, device=device, plan=candidate.plan.name)


def device_of(memory: float, link: str) -> str:
    """The device of the catalog with the least memory that is enough, of the same make by its link; empty when none has."""
    make = link.rstrip("0123456789")
    rows = {name: row for name, row in catalog.devices().items() if row["link"]["name"].rstrip("0123456789") == make and name != "cpu"}
    sizes = {name: parse_quantity(row["memory"], "B") for name, row in rows.items()}
    return min((name for name, size in sizes.items() if size >= memory), key=lambda name: sizes[name], default="")


class Best(NamedTuple):
    """A plan, its seconds a step, and whether its memory is tight."""

    plan: Plan
    seconds: float
    tight: bool


def fastest(job: Job, runnable: bool = False, known: Plan | None = None) -> Best | None:
    """The best plan that fits, over unlike groups too; None where none does, or none is legal. None that is slower than the one that is `known`
    need be priced, where that one fits."""
    try:
        even, placed = _even(job, runnable, known), unlike.plans(job, 1, runnable)
    except InputError:
        return None
    if placed and (even is None or placed[0][0] < even.score):
        priced = estimate(job, plan := placed[0][1])
        return Best(plan, priced.time.step, priced.verdict == Fits.tight)
    return Best(even.plan, even.seconds, even.tight) if even is not None else None


def _even(job: Job, runnable: bool, known: Plan | None) -> Candidate | None:
    """The best of those that treat all ranks alike. Where not even the plans that need least memory fit, no other is priced."""
    try:
        priced = estimate(job, known) if known is not None else None
    except InputError:  # its shares, or its actions, are of another batch
        priced = None
    if known is not None and priced is not None and priced.fits:
        return first(job, runnable, cautious(job, known, priced))
    least = quick(lean(job), runnable)
    if least.ranking.best:
        return first(job, runnable, least.ranking.best[0].score)
    return None if least.legal else first(job, runnable)


def lean(job: Job) -> Job:
    """The same with only the plans that need least memory: where none of them fits, the others need no pricing."""
    ordered = job.pins.keys() & {"schedule", "virtual_stages", "layers_per_stage"}
    return job.but(pins={**{name: value for name, value in LEAN.items() if name != "schedule" or not ordered}, **job.pins})


Change = tuple[str, dict[str, object], Job]
"""What is said of a change, with its numbers, and the changed job."""


def pins_less(job: Job) -> Iterator[Change]:
    """Without one of the pins; without all of them where one is not enough."""
    for name, value in job.pins.items():
        pins = {other: kept for other, kept in job.pins.items() if other != name}
        yield "near.pin", {"pin": f"{name}={value}"}, job.but(pins=pins)
    if len(job.pins) > 1:
        yield "near.pins", {}, job.but(pins={})


def chunked(job: Job) -> Iterator[Change]:
    """The loss in parts, so that all logits never exist: not searched, since where another plan fits it gains next to nothing (docs/log/planner.md)."""
    if "loss_chunks" not in job.pins:
        yield "near.chunks", {"chunks": CHUNKS}, job.but(pins={**job.pins, "loss_chunks": CHUNKS})


def disks(job: Job) -> Iterator[Change]:
    """A local disk in each node, where the cluster names none."""
    if not job.cluster.storage_bandwidth:
        groups = tuple(group.but(storage_bandwidth=group.storage_bandwidth or DISK) for group in job.cluster.groups)
        yield "near.disks", {"rate": DISK}, job.but(cluster=job.cluster.but(groups=groups))


def more_nodes(job: Job) -> Iterator[Change]:
    """More nodes of the same kinds; pins hold, but for the replicas, which more devices need more of."""
    pins = {name: value for name, value in job.pins.items() if not name.startswith("dp")}
    states = job.workload.bytes_per_parameter * job.model.parameters
    least = states / (job.cluster.memory * job.cluster.devices)
    for times in islice((times for times in multiples() if times >= least), TRIED):
        if times * job.cluster.devices > MANY:  # nobody could build it
            return
        groups = tuple(group.but(nodes=group.nodes * times) for group in job.cluster.groups)
        cluster = job.cluster.but(groups=groups)
        yield (
            "near.nodes",
            {"nodes": sum(group.nodes for group in groups), "devices": cluster.devices},
            job.but(cluster=cluster, pins=pins),
        )


def multiples() -> Iterator[int]:
    """2, 3, 4, 6, 8, 12, 16, ...: halves and doubles, which degrees divide."""
    for power in count(1):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def shorter(job: Job) -> Iterator[Change]:
    """A shorter sequence."""
    for part in PARTS:
        sequence = job.workload.sequence // part
        if sequence:
            yield "near.sequence", {"sequence": sequence}, job.but(workload=job.workload.but(sequence=sequence))
