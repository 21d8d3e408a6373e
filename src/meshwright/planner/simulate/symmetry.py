"""Selects the ranks that the simulation of a step (run.py) computes: one rank of each set of identical ranks.

The tensor and context ranks of one pipeline rank advance together. The simulation computes these ranks as one rank,
with the speed of the slowest of them.

A lane (`ReplicaClass`) is a simulated replica, with one simulated rank for each pipeline rank. A lane represents all
identical replicas. Without faults there is one lane. With faults there are three types of lanes:

- Faulty replicas. Replicas with equal faults share a lane if their shard groups also have equal faults.
- Healthy replicas of a shard group with a faulty replica. These replicas wait for the faulty replica in every
  collective of the group.
- Replicas of all shard groups without a fault. These replicas synchronize with the faulty groups when gradients are
  reduced over replicas.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from meshwright.spec.faults import Faults, SlowLink
from meshwright.spec.grid import Coords, rank_strides
from meshwright.spec.plan import Plan


class RankFault(NamedTuple):
    """The faults of one simulated rank. `slow` is the factor on the compute time of the rank, `links` the faults of its
    links."""

    pp: int
    slow: float
    links: tuple[SlowLink, ...]

    @property
    def share(self) -> float:
        """Returns the fraction of the link bandwidth that remains under the permanent faults. Temporary faults are
        ignored."""
        return min((link.share for link in self.links if link.seconds is None), default=1.0)


ReplicaFaults = tuple[RankFault, ...]


class ReplicaClass(NamedTuple):
    """A class of `replicas` identical replicas, also called a lane.

    `ranks` is the global rank of each pipeline rank in the first replica of the class, with tensor and context
    coordinates 0. `marks` is the faults of the pipeline ranks that have faults. `group` is the index of the replicas'
    shard group; shard groups with equal faults share an index.
    """

    replicas: int
    group: int
    ranks: tuple[int, ...]
    marks: ReplicaFaults

    def mark(self, pp: int) -> RankFault:
        """Returns the faults of pipeline rank `pp`, or a `RankFault` without slowdown if the rank is healthy."""
        return next((mark for mark in self.marks if mark.pp == pp), RankFault(pp, 1.0, ()))


def replica_classes(plan: Plan, faults: Faults) -> list[ReplicaClass]:
    """Returns one lane for every class of identical replicas. Lanes of shard groups with faults come first.

    >>> from meshwright.spec.plan import parse_plan
    >>> # rank 5 is in the replica with ranks 4, 5, 12 and 13
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
    """Returns the faults of each faulty replica, by its coordinates (dp_replicate, dp_shard)."""
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
    """Returns the global rank at the coordinates `place`. The plan's order of axes determines the rank.

    >>> from meshwright.spec.plan import parse_plan
    >>> rank_at_coords(parse_plan("dp4.tp2.pp2"), Coords(pp=1, dp_replicate=2, dp_shard=0, cp=0, tp=1))
    13
    """
    strides = rank_strides(plan)
    return sum(strides[axis] * at for axis, at in place._asdict().items())


def coords_of_rank(plan: Plan, rank: int) -> Coords:
    """Returns the mesh coordinates of the global rank `rank`."""
    strides = rank_strides(plan)
    return Coords(**{axis: rank // strides[axis] % getattr(plan, axis) for axis in Coords._fields})
