"""Measures links and collectives between ranks for a cluster profile (`CollectiveProfiler`), and finds slow links
between the hosts of a training run (`measure_links`).

`CollectiveProfiler` times the runtime's own collectives: an exchange between two ranks, and every collective, for
several tensor sizes, on several kinds of groups.

The kinds of groups are: 2, 4, 8 or all ranks of one host; all ranks; and one rank of every host. Disjoint groups of one
kind are timed at the same time, as in training. A timing is the time of the slowest rank. The result is the lower
quartile of several timings, so that other work on the machine has little effect.

With a CPU quota, one CPU second takes 1 / quota seconds of wall time. So the CPU time of a collective leaves a rank
less time to compute. This effect is hidden during the measurement, because ranks do not use up their quota. So after
each timed collective, a rank sleeps for the time that the quota would have added, and the sleep counts as part of the
timing.

[Note: synchronisation overhead] After a computation, a CPU rank may have to wait for a processor before it takes part
in a collective. If several ranks share a processor or have quotas, they also end their computation at different times.
So the profiler measures, on each kind of group, by how much a small collective delays a loop of matrix products.

`measure_links` runs between two training steps. The first rank of each host sends and receives for the host. Disjoint
pairs of hosts exchange messages at the same time, and then hosts form new pairs. Both hosts of a pair send at the same
time. The message size grows until a transfer takes long enough to time. The result is the fastest of several transfers,
because no other traffic uses the links between steps. Links are measured only if ranks wait longer than in earlier
steps (train/straggler.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.messages import Message
from meshwright.core.units import show_rate
from meshwright.runtime.backend import ProfilingSizes, backend_of
from meshwright.runtime.comm.async_collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from meshwright.runtime.comm.group import CommGroup, wrap_process_group, wrap_shm_collectives
from meshwright.runtime.comm.shm.collectives import FIELDS_PER_GROUP, ShmCollectives
from meshwright.runtime.comm.shm.memory import FIELDS_PER_RANK
from meshwright.runtime.comm.topology import build_hierarchical_group
from meshwright.runtime.host_process import host_id
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.profiler.interconnect import own_connections
from meshwright.spec.cluster import SLOW_LINK_RATIO, CollectiveSample, LinkSample, find_network_tiers

COLLECTIVE_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
MIN_MESSAGE_BYTES, LARGE_MESSAGE_BYTES = 8, 2**17
"""Sizes of a message between two ranks, in bytes. Latency is measured with MIN_MESSAGE_BYTES. Bandwidth is measured
with LARGE_MESSAGE_BYTES. This size is multiplied by 4 until a transfer takes MIN_TRANSFER_SECONDS longer than the
latency, or until the largest message of the backend (`ProfilingSizes.max_message`)."""

MAX_TRAINING_MESSAGE_BYTES = 2**25
"""Bytes of the largest message of `measure_links`, which runs while the device has little free memory."""

MIN_TRANSFER_SECONDS = 0.01

MAX_REPEATS, MIN_REPEATS, REPEAT_BUDGET_SECONDS = 24, 3, 0.06
"""Maximum and minimum number of repetitions of a timing. Within these limits, the number is chosen so that all
repetitions together take about REPEAT_BUDGET_SECONDS."""

LONG_COLLECTIVE_SECONDS, BANDWIDTH_BOUND_FACTOR = 0.1, 3.0
"""If a size takes at least LONG_COLLECTIVE_SECONDS, and at least BANDWIDTH_BOUND_FACTOR times as long as the smallest
size, no larger sizes are timed, because bandwidth dominates their time."""

LATENCY_BOUND_SECONDS = 0.01
"""If the smallest size takes at least this number of seconds, the second size is not timed, because latency dominates
the time of both."""

COMPUTE_SECONDS, MAX_SYNC_TURNS, SYNC_ROUNDS = 0.008, 16, 5
"""For the synchronisation overhead. One turn is COMPUTE_SECONDS of computation and one collective. MAX_SYNC_TURNS: the
maximum number of turns in one timing. SYNC_ROUNDS: the number of timings of each kind of group."""

SYNC_BUDGET_SECONDS, MIN_SYNC_TURNS = 0.25, 4
"""The number of turns in one timing is chosen so that the timing takes about SYNC_BUDGET_SECONDS, but it is at least
MIN_SYNC_TURNS."""


@dataclass
class CollectiveProfiler:
    """Measures collectives on this rank. `hosts`: the ranks of each host, in order. `made`: the number of groups that
    use fields of the shared memory. All ranks create the profiler and call its methods in the same order."""

    mesh: ParallelContext
    hosts: tuple[tuple[int, ...], ...]
    made: int = 0
    groups: dict[tuple[int, ...], CommGroup | None] = field(default_factory=dict)
    share: float = 1.0
    """Fraction of a processor that this rank gets while all ranks compute."""

    quota: float = 1.0
    """Fraction of a processor that the cgroup of this rank allows, at most 1."""

    def group(self, ranks: tuple[int, ...]) -> CommGroup | None:
        """Returns the group of `ranks`, or None if this rank is not in `ranks`. All ranks request all groups in the
        same order."""
        if ranks not in self.groups:
            self.groups[ranks] = self._join(ranks)
        return self.groups[ranks]

    def _join(self, ranks: tuple[int, ...]) -> CommGroup | None:
        shared, mine = self.mesh.topology.shares_memory(list(ranks)), self.mesh.rank in ranks
        self.made += shared or len(ranks) > 2
        if shared:
            assert self.mesh.shared_memory is not None
            return (
                wrap_shm_collectives(ShmCollectives(self.mesh.shared_memory, list(ranks), self.made * FIELDS_PER_GROUP))
                if mine
                else None
            )
        process = dist.new_group(list(ranks))
        tiers = (
            build_hierarchical_group(self.mesh.topology, self.made * FIELDS_PER_GROUP, ranks)
            if self.mesh.topology.shm_host_ids
            else None
        )
        flat = wrap_process_group(process) if mine else None
        return None if flat is None else CommGroup(flat.ranks, flat.index, flat.process_group, tiers)

    @property
    def profiling(self) -> ProfilingSizes:
        """The sizes of the backend of this rank's device."""
        return backend_of(self.mesh.device).profiling

    @property
    def room(self) -> bool:
        """Returns whether the shared memory has room for one more group."""
        return (self.made + 2) * FIELDS_PER_GROUP <= FIELDS_PER_RANK

    # --- pairs of ranks

    def pairs(self) -> list[LinkSample]:
        """Measures one pair of ranks after the other, and returns the samples. Every two hosts are measured by one pair
        of ranks. The pairs of a host use its ranks in turn. On a host with accelerators, the rank of the first
        accelerator is also paired with each rank of another. CPU ranks of one host have no link.
        """
        found, kinds = [], self._host_connections()
        for first, second in self._chosen():
            if not self.room:
                break
            group = self.group((first, second))
            latency, size, large = self._pair(group, MIN_MESSAGE_BYTES), LARGE_MESSAGE_BYTES, 0.0
            while large - latency < MIN_TRANSFER_SECONDS and size <= self.profiling.max_message:
                large, size = self._pair(group, size), 4 * size
            rate = size / 4 / max(large - latency, 1e-9)
            kind = kinds.get((first, second), "")
            found.append(LinkSample(first=first, second=second, latency=latency, bandwidth=rate, kind=kind))
        return found

    def _host_connections(self) -> dict[tuple[int, int], str]:
        """Returns how the devices of two ranks of one host are connected, for all pairs that the driver knows."""
        mine = own_connections(self.mesh.device)
        every = [mine]
        if self.mesh.plan.world > 1:
            every = [mine] * self.mesh.plan.world
            dist.all_gather_object(every, mine)
        place = {each.uuid: rank for rank, each in enumerate(every) if each.uuid}
        return {
            (place[each.uuid], place[other]): kind
            for each in every
            for other, kind in each.kinds.items()
            if other in place
        }

    def _chosen(self) -> list[tuple[int, int]]:
        chosen = [
            (host[0], other)
            for host in self.hosts
            for other in host[1:]
            if not backend_of(self.mesh.device).memory_is_host
        ]
        for at, one in enumerate(self.hosts):
            for step, other in enumerate(self.hosts[at + 1 :]):
                chosen.append((one[step % len(one)], other[at % len(other)]))
        return sorted(chosen)

    def _pair(self, group: CommGroup | None, size: int) -> float:
        """Returns, on every rank, the seconds until both ranks of the pair `group` have received `size` bytes."""
        out, sent = self.messages(size)
        return self._time(lambda: all_to_all(out, sent, group).wait(), group)

    def messages(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a receive buffer and a send buffer, each for two messages of `size` bytes. The buffers are in device
        memory, as in training, because a different backend would send CPU tensors."""
        sent = torch.ones(2 * size // 4, device=self.mesh.device)
        return torch.empty_like(sent), sent

    # --- timings of collectives

    def timings(self) -> list[CollectiveSample]:
        """Measures every collective with several sizes on each kind of group, as long as the shared memory has room for
        another group. Returns the samples."""
        found = []
        for members, stride in self._sets():
            if not self.room:
                break
            groups = [self.group(ranks) for ranks in members]
            mine = next((group for group in groups if group is not None), None)
            for kind in COLLECTIVE_KINDS:
                found += self._sizes(kind, mine, len(members[0]), stride)
        return found

    def meetings(self) -> list[CollectiveSample]:
        """Measures the seconds by which a small collective delays computation ([Note: synchronisation overhead]), and
        returns the samples. Returns [] for accelerators, which compute without a CPU and have no such overhead."""
        found: list[tuple[int, int, int]] = []
        ways: list[tuple[Callable[[], None], int]] = [(lambda: None, MAX_SYNC_TURNS)]
        for members, stride in self._sets() if backend_of(self.mesh.device).memory_is_host else ():
            if not self.room:
                break
            ranks, groups = len(members[0]), [self.group(each) for each in members]
            mine = next((group for group in groups if group is not None), None)
            found.append((ranks, stride, -(-self.profiling.collectives[0] // 4 // ranks) * ranks))
            meet = self._collective("reduce_scatter", found[-1][2], ranks, mine)
            ways.append(
                (meet, min(max(int(SYNC_BUDGET_SECONDS / self._computing(meet, 2)), MIN_SYNC_TURNS), MAX_SYNC_TURNS))
            )
        if not found:
            return []
        rounds = [[self._computing(*way) for way in ways] for _ in range(SYNC_ROUNDS)]
        single, *meeting = (sorted(each)[SYNC_ROUNDS // 4] for each in zip(*rounds, strict=True))
        return [
            CollectiveSample(
                kind="reduce_scatter", ranks=ranks, stride=stride, size=4.0 * numel, seconds=max(seconds - single, 0.0)
            )
            for (ranks, stride, numel), seconds in zip(found, meeting, strict=True)
        ]

    def _computing(self, meet: Callable[[], None], turns: int = MAX_SYNC_TURNS) -> float:
        """Returns the wall-clock seconds per turn on the slowest rank. In each turn a rank computes until it has used
        COMPUTE_SECONDS x `share` seconds of thread time. Then it calls `meet`, which runs a collective."""
        matrix, world, flag = torch.ones(128, 128), self.mesh.world, torch.zeros(1, dtype=torch.float64)
        all_reduce(flag, world).wait()
        for turn in range(-1, turns):
            if turn == 0:
                began = time.perf_counter()  # the clock starts after one warm-up turn
            worked = time.thread_time()
            while time.thread_time() - worked < COMPUTE_SECONDS * self.share:
                torch.mm(matrix, matrix)
            meet()
        all_reduce(flag.fill_(time.perf_counter() - began), world, use_max=True).wait()
        return float(flag) / turns

    def _sizes(self, kind: str, group: CommGroup | None, ranks: int, stride: int) -> list[CollectiveSample]:
        found: list[CollectiveSample] = []
        sizes = self.profiling.collectives
        for size in sizes:
            if size == sizes[1] and found[0].seconds > LATENCY_BOUND_SECONDS:
                continue
            numel = -(-size // 4 // ranks) * ranks
            seconds = self._time(self._collective(kind, numel, ranks, group), group)
            found.append(CollectiveSample(kind=kind, ranks=ranks, stride=stride, size=4.0 * numel, seconds=seconds))
            if seconds > max(LONG_COLLECTIVE_SECONDS, BANDWIDTH_BOUND_FACTOR * found[0].seconds):
                break
        return found

    def _sets(self) -> list[tuple[list[tuple[int, ...]], int]]:
        """Returns sets of groups, each with the stride between the ranks of a group. The groups of a set are disjoint,
        have equal sizes, and are timed at the same time."""
        least = min(map(len, self.hosts))
        lengths = sorted({length for length in (2, 4, 8, least) if 1 < length <= least})
        sets = [
            ([host[at : at + n] for host in self.hosts for at in range(0, len(host) - n + 1, n)], 1) for n in lengths
        ]
        if len(self.hosts) > 1:
            sets.append(([tuple(range(self.mesh.plan.world))], 1))
            if least > 1:
                sets.append(([tuple(host[at] for host in self.hosts) for at in range(least)], least))
        return sets

    def _collective(self, kind: str, numel: int, ranks: int, group: CommGroup | None) -> Callable[[], None]:
        """Returns a function that runs a collective of `numel` float32 elements as the runtime does: if ranks share
        memory, tensors that other ranks read are in shared memory. The function does nothing if `group` is None."""
        place = (
            self.mesh.shared_memory.zeros
            if self.mesh.shared_memory is not None
            else lambda numel, dtype: torch.zeros(numel, dtype=dtype)
        )
        full = place(numel, torch.float32).to(self.mesh.device) if group is not None else torch.zeros(0)
        if group is None:
            return lambda: None
        shard, other = full[group.index * (numel // ranks) :][: numel // ranks], torch.empty_like(full)
        return {
            "all_reduce": lambda: all_reduce(full, group).wait(),
            "reduce_scatter": lambda: reduce_scatter(full, shard, group).wait(),
            "all_gather": lambda: all_gather(full, shard, group).wait(),
            "all_to_all": lambda: all_to_all(other, full, group).wait(),
        }[kind]

    def _time(self, action: Callable[[], None], group: CommGroup | None) -> float:
        """Returns the seconds of `action` on the slowest rank: the lower quartile of several timings.

        All ranks call it. Ranks outside of the group wait. All ranks communicate to agree on the number of repetitions.
        Between two repetitions only the group synchronises, because a barrier of all ranks may take longer than the
        timed action.
        """
        self._once(action, group)
        first = self._slowest([self._once(action, group) for _ in range(2)])
        more = min(max(int(REPEAT_BUDGET_SECONDS / max(min(first), 1e-9)), MIN_REPEATS), MAX_REPEATS) - len(first)
        spent = first + self._slowest([self._once(action, group) for _ in range(more)])
        return sorted(spent)[len(spent) // 4]

    def _once(self, action: Callable[[], None], group: CommGroup | None) -> float:
        """Returns the seconds of `action` on this rank, including the sleep for the rank's CPU quota. Returns 0 if
        `group` is None."""
        if group is None:
            return 0.0
        all_reduce(torch.zeros(1, dtype=torch.float64), group).wait()
        began, worked = time.perf_counter(), time.process_time()
        action()
        backend_of(self.mesh.device).synchronize(self.mesh.device)
        passed = time.perf_counter() - began
        rest = min(time.process_time() - worked, passed) * (1.0 / self.quota - 1.0)
        time.sleep(rest)
        return passed + rest

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Returns the element-wise maximum of `seconds` over all ranks."""
        found = torch.tensor(seconds, dtype=torch.float64)
        all_reduce(found, self.mesh.world, use_max=True).wait()
        return [float(each) for each in found]


NUM_EXCHANGES = 3
SIMILAR_RATE_FACTOR = 2.0
"""The slowest link is reported together with the links whose rate is at most this factor higher. The factor allows for
short delays, such as those of ranks on busy CPUs."""

MAX_ROUNDS = 32
"""Maximum number of rounds, each with disjoint pairs of hosts. So in a larger cluster, each host is measured with at
most this number of other hosts."""


def measure_links(mesh: ParallelContext, beat: Callable[[], None] = lambda: None) -> list[LinkSample]:
    """Measures the links between the first ranks of hosts. Returns the samples of all pairs on every rank, or [] if all
    ranks are on one host. All ranks call this function. On the ranks of a pair, calls `beat` before the measurement, to
    report that the rank is alive."""
    hosts: list[Any] = list(mesh.topology.shm_host_ids)
    if mesh.plan.world > 1 and not all(hosts or [""]):
        hosts = [None] * mesh.plan.world
        dist.all_gather_object(hosts, host_id())
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) < 2:
        return []
    mine = []
    for pairs in list(pair_rounds(len(firsts)))[:MAX_ROUNDS]:
        for pair in pairs:
            first, second = (firsts[place] for place in pair)
            if mesh.rank in (first, second):
                beat()
                found = _measure_pair(first, second, mesh)
                mine += [found] if mesh.rank == first else []
    every: list[Any] = [None] * mesh.plan.world
    dist.all_gather_object(every, mine)
    return sorted((pair for each in every for pair in each), key=lambda pair: (pair.first, pair.second))


def pair_rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of disjoint pairs of hosts, called rounds. Every two hosts are a pair in exactly one round.

    >>> list(pair_rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> list(pair_rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places = list(range(hosts + hosts % 2))
    half = len(places) // 2
    for _ in places[1:]:
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield sorted((min(pair), max(pair)) for pair in facing if max(pair) < hosts)
        places = [places[0], places[-1], *places[1:-1]]


def find_slow_links(
    mesh: ParallelContext, beat: Callable[[], None] = lambda: None
) -> list[tuple[tuple[int, ...], str]]:
    """Measures the links between hosts and returns the result of `describe_slow_links`. All ranks call this function
    together and get equal results."""
    return describe_slow_links(measure_links(mesh, beat), mesh.plan.world)


def describe_slow_links(pairs: Sequence[LinkSample], ranks: int) -> list[tuple[tuple[int, ...], str]]:
    """Returns ((), description) for each slow link among `pairs`, or for each rank whose links are all slow. The
    description names the ranks. If no link is slow, the only description says so.

    A single pair cannot be compared with others. For it, returns (its two ranks, a description of its bandwidth).
    Returns [] if `pairs` is empty.

    >>> def pair(first, second, rate): return LinkSample(first=first, second=second, latency=1e-5, bandwidth=rate)
    >>> describe_slow_links([pair(0, 2, 1e6)], 4)
    [((0, 2), 'the link between the hosts of ranks 0 and 2 carries 1.00 MB/s')]
    >>> describe_slow_links([pair(0, 1, 1e6), pair(0, 2, 1.1e6), pair(1, 2, 1e6)], 3)
    [((), 'no link between hosts is slower than the others: 1.00 MB/s each')]
    """
    if not pairs:
        return []
    if len(pairs) == 1:
        (pair,) = pairs
        words = Message(
            "the link between the hosts of ranks {first} and {second} carries {bandwidth}",
            first=pair.first,
            second=pair.second,
            bandwidth=show_rate(pair.bandwidth),
        )
        return [((pair.first, pair.second), words)]
    rates = [pair.bandwidth for pair in pairs]
    odd = find_network_tiers(pairs, ranks, min(SLOW_LINK_RATIO, SIMILAR_RATE_FACTOR * min(rates) / median(rates))).odd
    if not odd:
        return [
            (
                (),
                Message(
                    "no link between hosts is slower than the others: {median} each", median=show_rate(median(rates))
                ),
            )
        ]
    return [((), line) for line in odd]


def _measure_pair(first: int, second: int, mesh: ParallelContext) -> LinkSample:
    """Returns the sample of the link between the hosts of ranks `first` and `second`. The sample is that of the slower
    direction, on both ranks."""
    other = second if mesh.rank == first else first
    latency, size, large = _exchange_seconds(other, 1, mesh), LARGE_MESSAGE_BYTES, 0.0
    while large - latency < MIN_TRANSFER_SECONDS and size <= MAX_TRAINING_MESSAGE_BYTES:
        large, size = _exchange_seconds(other, size // 4, mesh), 4 * size
    return LinkSample(first=first, second=second, latency=latency, bandwidth=size / 4 / max(large - latency, 1e-9))


def _exchange_seconds(other: int, numel: int, mesh: ParallelContext) -> float:
    """Returns the seconds of the fastest of NUM_EXCHANGES exchanges of `numel` float32 elements. The time of an
    exchange is that of the slower rank."""
    sent = torch.ones(numel, device=mesh.device)
    out = torch.empty_like(sent)
    tries = torch.zeros(NUM_EXCHANGES, dtype=torch.float64, device=mesh.device)
    for number in range(NUM_EXCHANGES):
        _exchange(tries[:1], torch.empty_like(tries[:1]), other)  # both ranks must be ready before the clock starts
        began = time.perf_counter()
        _exchange(sent, out, other)
        tries[number] = time.perf_counter() - began
    theirs = torch.empty_like(tries)
    _exchange(tries, theirs, other)
    return float(torch.maximum(tries, theirs).min())


def _exchange(sent: torch.Tensor, out: torch.Tensor, other: int) -> None:
    """Sends `sent` to rank `other` and receives `out` from it at the same time."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, out, other)]):
        work.wait()
    backend_of(sent.device).synchronize(sent.device)
