"""Selects the ranks to simulate: one of each set of identical ranks.

The tensor and context ranks of one pipeline rank advance together. They are simulated as one rank with the speed of the
slowest of them. A lane is a simulated replica, with one simulated rank for each pipeline rank. Healthy replicas are
identical, so one lane represents all of them. A fault breaks this symmetry. Each faulty replica has a separate lane. A
second lane represents the healthy replicas of its shard group, which wait for the faulty replica in every collective of
the group. A third lane represents all other shard groups, which synchronize with the faulty group when gradients are
reduced over replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.planner.simulate.events import LinkTier
from meshwright.spec.faults import Faults, SlowLink
from meshwright.spec.grid import Coords, rank_strides
from meshwright.spec.plan import Plan


class RankFault(NamedTuple):
    """The faults of one simulated rank: its slowdown, and the faults of its links."""

    pp: int
    slow: float
    links: tuple[SlowLink, ...]

    @property
    def share(self) -> float:
        """Returns the fraction of the link bandwidth that is permanently available."""
        return min((link.share for link in self.links if link.seconds is None), default=1.0)


ReplicaFaults = tuple[RankFault, ...]


class ReplicaClass(NamedTuple):
    """A class of `replicas` identical replicas. For each pipeline rank, `ranks` has its first rank and `marks` its
    fault. `group` is the class of the shard group."""

    replicas: int
    group: int
    ranks: tuple[int, ...]
    marks: ReplicaFaults

    def mark(self, pp: int) -> RankFault:
        """Returns the fault of a pipeline rank."""
        return next((mark for mark in self.marks if mark.pp == pp), RankFault(pp, 1.0, ()))


def replica_classes(plan: Plan, faults: Faults) -> list[ReplicaClass]:
    """Returns one lane for every class of identical replicas. Lanes with faults come first.

    >>> from meshwright.spec.plan import parse_plan
    >>> [(lane.replicas, lane.ranks) for lane in replica_classes(parse_plan("dp4.tp2.pp2"), Faults(slow=[(5, 2.0)]))]
    [(1, (4, 12)), (3, (0, 8))]
    """
    wrong = _faults_by_replica(plan, faults)
    groups: dict[tuple[ReplicaFaults, ...], list[int]] = {}
    for at in range(plan.dp_replicate):
        kind = tuple(sorted(marks for (replicate, _), marks in wrong.items() if replicate == at))
        groups.setdefault(kind, []).append(at)
    found = []
    for number, (kind, same) in enumerate(sorted(groups.items(), key=lambda item: (not item[0], item[1]))):
        members = Counter(kind)
        healthy = plan.dp_shard - len(kind)
        for marks, count in [*members.items(), *([((), healthy)] if healthy else [])]:
            shard = next(shard for shard in range(plan.dp_shard) if wrong.get((same[0], shard), ()) == marks)
            ranks = tuple(rank_at_coords(plan, Coords(pp, same[0], shard, 0, 0)) for pp in range(plan.pp))
            found.append(ReplicaClass(count * len(same), number, ranks, marks))
    return found


def _faults_by_replica(plan: Plan, faults: Faults) -> dict[tuple[int, int], ReplicaFaults]:
    """Returns the faults of each replica with faults."""
    slow: dict[Coords, list[float]] = {}
    links: dict[Coords, list[SlowLink]] = {}
    for fault in faults.slow:
        slow.setdefault(coords_of_rank(plan, fault.rank)._replace(cp=0, tp=0), []).append(fault.factor)
    for link in faults.link:
        links.setdefault(coords_of_rank(plan, link.rank)._replace(cp=0, tp=0), []).append(link.but(rank=0))
    found: dict[tuple[int, int], list[RankFault]] = {}
    for place in sorted({*slow, *links}):
        factors = slow.get(place, [])
        healthy = plan.tp * plan.cp > len(factors)
        mark = RankFault(place.pp, max([*factors, *([1.0] if healthy else [])]), tuple(links.get(place, ())))
        found.setdefault((place.dp_replicate, place.dp_shard), []).append(mark)
    return {replica: tuple(marks) for replica, marks in found.items()}


def rank_at_coords(plan: Plan, place: Coords) -> int:
    """Returns the rank at the coordinates `place`, in the plan's order of axes.

    >>> from meshwright.spec.plan import parse_plan
    >>> rank_at_coords(parse_plan("dp4.tp2.pp2"), Coords(pp=1, dp_replicate=2, dp_shard=0, cp=0, tp=1))
    13
    """
    strides = rank_strides(plan)
    return sum(strides[axis] * at for axis, at in place._asdict().items())


def coords_of_rank(plan: Plan, rank: int) -> Coords:
    """Returns the coordinates of a rank."""
    strides = rank_strides(plan)
    return Coords(**{axis: rank // strides[axis] % getattr(plan, axis) for axis in Coords._fields})


def link_tier(ranks: Sequence[int], domain: int) -> LinkTier:
    """Returns the near tier if all of `ranks` are in one domain, otherwise the far tier."""
    return LinkTier.near if len({rank // domain for rank in ranks}) == 1 else LinkTier.far
