"""Who holds the others up, and by what: a verdict from the phases that every rank measures anyway, and the shares that
would make up for it.

    computing    the step without waiting for data and without waiting for other ranks: on a slow rank longer than on
    its peers
    data         waiting for the batch: its reader or its disk is slow; where all wait, that of all of them
    communication   everyone waits longer for others than before, though nobody computes longer: a link is slow, and
    hosts measure which one

Rule: medians over WINDOW steps. A rank is slow that takes RATIO times the middle of its peers, the ranks that hold the
same stage, at least
PART of the step more, and SPREADS times as much more as its steps, or its peers', differ among themselves (the median
of their distances from
the median), in MOST of the steps by half of that ratio: where other programs take cores now from one rank and now from
another, steps differ as
much as ranks do and nothing is said. Computing counts by sequence, as peers may have unlike shares. A verdict falls
when the same is found
STEADY steps in a row, and again when all is well. Where the plan has unlike shares its devices are unlike, and what
each took in the first window stands for
what it should take. All ranks see the same numbers and come to the same verdict, with no message of its own. A stage
that
one rank alone holds is compared with what it took before, as far as the other stages did not change alike.

[Note: adjusted shares] Where replicas meet once a step, the shares follow the speeds at a step boundary: what changes
is who reads which rows. The loss stays
that of one device; the order of its sums does not, so that a run that adjusts itself is not repeated bit for bit. It
must be asked for. Whole micro-batches may be too coarse:
16 among four replicas of which one is 1.5 times as slow are 5-4-4-3, a step 15 % longer than by speeds. Where halves of
them promise GAIN more, replicas share those out, and
each passes as many at once as divide its sequences, never more than before. A rank with few sequences seems slow beside
peers with many, as an update takes as long for both:
when nobody is slow any more, the first shares promise the step of the first window, unless by speed that rank would
hold the others up clearly.

[Note: ranks that are left out] Where no shares help, the rank is told of once it has been slow for LONG steps, and then
every WINDOW: `Asked`, with what a step takes and
what it would take if the rank computed as its peers do. Who runs the ranks decides (elastic/device_exclusion.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import gcd
from statistics import median
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.spec.batch_layout import micro_batch_rows, micro_batches_by_speed
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan

MEDIAN_WINDOW_STEPS = 10
MIN_SLOWDOWN_RATIO, MIN_STEP_FRACTION = 1.3, 0.1
MIN_SPREAD_RATIO, MIN_SLOW_STEPS_FRACTION, CONFIRMATION_STEPS = 4.0, 0.9, 8
MIN_GAIN_FRACTION = 0.05
"""Part of the step that new shares must promise."""

EXCLUSION_DELAY_STEPS = 20
"""Steps after the verdict for which a rank must have been slow before it may be left out."""

WARMUP_STEPS = 2
"""Steps of a launch that do not count: they learn shapes and fill caches."""

ALL_HEALTHY_TEXT = "nobody holds the others up any more"


class SlowPhase(StrEnum):
    """What a rank is slow at."""

    computing = "computing"
    data = "data"
    communication = "communication"


class PhaseSeconds(NamedTuple):
    """Seconds of one step by rank."""

    computing: tuple[float, ...]
    data: tuple[float, ...]
    waiting: tuple[float, ...]


class Straggler(NamedTuple):
    """A rank (-1: all of them) and how many times the seconds of its peers, or of before, it takes; of data for which
    all wait the part of a step."""

    rank: int
    phase: SlowPhase
    times: float
    than: str = "its peers"

    @property
    def words(self) -> str:
        if self.rank < 0 and self.phase == SlowPhase.data:
            return f"every rank waits for its data, {self.times:.0%} of a step: its readers are slow".replace("%", " %")
        if self.rank < 0:
            return f"every rank waits {self.times:.1f} times as long for the others as before: a link is slow"
        what = "computes" if self.phase == SlowPhase.computing else "waits for its data"
        return f"rank {self.rank} {what} {self.times:.1f} times as long as {self.than}"


class ExclusionRequest(NamedTuple):
    """Ranks that compute slowly, how many times as long as their peers the worst of them, and seconds of a step with
    them as they are and `without` what they
    compute longer."""

    ranks: tuple[int, ...]
    times: float
    seconds: float
    without: float


class StragglerMonitor:
    """Hears the phases of each step of one launch under `plan`. `tell` gets what a machine is to know: a kind of
    message and its entries."""

    def __init__(
        self,
        plan: Plan,
        batch: int,
        say: Callable[[str], None] = lambda _: None,
        tell: Callable[..., None] = lambda *_, **__: None,
        halves: bool = True,
        links: Callable[[], Sequence[tuple[tuple[int, ...], str]]] = tuple,
    ) -> None:
        """`halves`: micro-batches may become smaller, which exact sums, a balance loss and compiled blocks do not
        allow. `links`: ranks and words of which
        links are slow, measured by all ranks together."""
        self.batch, self.say, self.tell, self.slow = batch, say, tell, frozenset[tuple[int, SlowPhase]]()
        self.first, self.halves, self.links = plan, halves and not plan.compile, links
        self.grid = RankGrid(plan)
        self.follow(plan)
        self._seen = self._steady = self._since = 0
        self._found = frozenset[tuple[int, SlowPhase]]()
        self._usual: float | None = None
        self._differing = 0.0
        self._before: list[float] = []
        self._unlike = len(set(self.counts)) > 1
        self._healthy = 0.0

    def follow(self, plan: Plan) -> None:
        """From now on the ranks run under `plan`, which differs in shares and sizes of micro-batches alone."""
        self.plan, self._window = plan, deque[PhaseSeconds](maxlen=MEDIAN_WINDOW_STEPS)
        self._promised: tuple[float, float] | None = None
        rows = self._rows(plan)
        self.counts = [rows[self.grid.replica(rank)] for rank in range(plan.world)]

    def heed(self, phases: PhaseSeconds, step: int, balance: bool) -> Plan | None:
        """Says what has changed; with `balance` the plan to go on with, where another one is better."""
        found = self.hear(phases)
        self._compare(step)
        if found is not None:
            said: list[tuple[tuple[int, ...], str]] = [
                ((slow.rank,) if slow.rank >= 0 else (), slow.words) for slow in found
            ] or [((), ALL_HEALTHY_TEXT)]
            said += self.links() if any(slow.phase == SlowPhase.communication for slow in found) else ()
            for ranks, words in said:
                self.say(f"step {step}: {words}")
                self.tell("verdict", step=step, ranks=ranks, words=words)
        changed = bool(self.slow) or self.plan != self.first
        again = (
            found is None and changed and self._seen % MEDIAN_WINDOW_STEPS == 0
        )  # who is slow may have become slower, or faster
        better = self.better() if balance and (found is not None or again) else None
        if better is None or (again and better[1] < 1.0 + 2 * MIN_GAIN_FRACTION):
            if balance and again and (asked := self.asks()) is not None:
                self.tell("slow", step=step, plan=self.plan.name, **asked._asdict())
            return None
        plan, times = better
        self.say(f"step {step}: {plan.name} from here on, {times:.2f} times as fast predicted")
        self.tell("rebalanced", step=step, plan=plan.name, predicted=times)
        promised = (self._seconds(), times)
        self.follow(plan)
        self._promised = promised
        return plan

    def _compare(self, step: int) -> None:
        """Once a window of steps has passed under another plan: what it gained, beside what was predicted."""
        if self._promised is not None and len(self._window) == MEDIAN_WINDOW_STEPS:
            before, times = self._promised
            self._promised, found = None, before / self._seconds()
            self.say(f"step {step}: {self.plan.name} is {found:.2f} times as fast as before it, {times:.2f} predicted")
            self.tell("rebalance_result", step=step, plan=self.plan.name, predicted=times, measured=found)

    def _seconds(self) -> float:
        """Of a step, in the middle of the window."""
        return median(max(map(sum, zip(*each, strict=True))) for each in self._window)

    def hear(self, phases: PhaseSeconds) -> list[Straggler] | None:
        """Who is slow now, the worst first, when that has changed; an empty list when nobody is any more."""
        self._seen += 1
        if self._seen <= WARMUP_STEPS:
            return None
        self._window.append(phases)
        if len(self._window) < MEDIAN_WINDOW_STEPS:
            return None
        self._healthy = self._healthy or self._seconds()
        found = sorted(self._slow(), key=lambda slow: -slow.times)
        now = frozenset((slow.rank, slow.phase) for slow in found)
        self._steady, self._found = self._steady + 1 if now == self._found else 1, now
        if self._steady < CONFIRMATION_STEPS or now == self.slow:
            return None
        self.slow, self._since = now, self._seen
        return found

    def asks(self) -> ExclusionRequest | None:
        """The ranks that have computed slowly for long ([Note: ranks that are left out])."""
        slow = {rank for rank, phase in self.slow if phase == SlowPhase.computing}
        now = {each.rank: each.times for each in self._slow() if each.phase == SlowPhase.computing}
        others = [rank for rank in range(self.plan.world) if rank not in slow]
        if not slow or not others or slow != now.keys() or self._seen < self._since + EXCLUSION_DELAY_STEPS:
            return None
        busy = self._middle("computing")
        usual = [
            max(busy[other] for other in held) if (held := set(self._peers(rank)) - slow) else busy[rank] / now[rank]
            for rank in slow
        ]
        seconds = self._seconds()
        longer = max(busy[rank] - each for rank, each in zip(slow, usual, strict=True))
        if longer < MIN_STEP_FRACTION * seconds:
            return None
        return ExclusionRequest(tuple(sorted(slow)), max(now.values()), seconds, seconds - longer)

    def better(self) -> tuple[Plan, float] | None:
        """The plan whose shares (and halves of micro-batches) follow the speeds of now, and by how many times a step
        should be shorter; None where that is not worth it, or not legal."""
        if len(self._window) < MEDIAN_WINDOW_STEPS or self.plan.dp < 2:
            return None
        each = self._by_sequence()
        replicas = [
            max(each[rank] for rank in range(self.plan.world) if self.grid.replica(rank) == replica)
            for replica in range(self.plan.dp)
        ]
        end = lambda rows: max(count * seconds for count, seconds in zip(rows, replicas, strict=True))
        held = self._rows(self.plan)
        shared = self._shared(replicas, 1)
        if self.halves and end(finer := self._shared(replicas, 2)) < (1.0 - MIN_GAIN_FRACTION) * end(shared):
            shared = finer
        before, after = end(held), end(shared)
        step = before + median(
            self._middle("waiting")[rank]
            for rank in range(self.plan.world)
            if self.grid.replica(rank) == replicas.index(max(replicas))
        )
        promised = {self.plan: step}
        if before - after >= MIN_GAIN_FRACTION * step and (adjusted := self._of(shared)) is not None:
            promised[adjusted] = step - before + after
        if (
            self._healthy
            and not self.slow
            and self.plan != self.first
            and end(self._rows(self.first)) <= (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * before
        ):
            promised[self.first] = min(self._healthy, promised.get(self.first, step))
        plan = min(promised, key=promised.__getitem__)
        return (plan, step / promised[plan]) if step - promised[plan] >= MIN_GAIN_FRACTION * step else None

    def _rows(self, plan: Plan) -> list[int]:
        """Sequences of each replica in a step."""
        return [sum(size for _, size in micro_batch_rows(plan, self.batch, replica)) for replica in range(plan.dp)]

    def _shared(self, seconds: Sequence[float], parts: int) -> list[int]:
        """The sequences of each replica by its seconds for one, in whole micro-batches of the first plan, or in halves
        where these are whole."""
        unit = gcd(self.first.micro_batch, *self.first.micro_batch_sizes)
        unit = unit // parts if unit % parts == 0 else unit
        return [unit * count for count in micro_batches_by_speed([1.0 / each for each in seconds], self.batch // unit)]

    def _of(self, rows: Sequence[int]) -> Plan | None:
        """The plan under which each replica reads so many sequences, in as few micro-batches as are no larger than
        those of the first plan. None
        where it is not legal."""
        most = [self.first.micro_batch_of(replica) for replica in range(self.first.dp)]
        sizes = [
            max(size for size in range(1, limit + 1) if held % size == 0)
            for held, limit in zip(rows, most, strict=True)
        ]
        counts = [held // size for held, size in zip(rows, sizes, strict=True)]
        unlike = [values if len(set(values)) > 1 else () for values in (sizes, counts)]
        try:
            return self.first.but(micro_batch=max(sizes), micro_batch_sizes=tuple(unlike[0]), shares=tuple(unlike[1]))
        except InputError:
            return None

    def _middle(self, phase: str) -> list[float]:
        """By rank the median over the window."""
        return [median(getattr(each, phase)[rank] for each in self._window) for rank in range(self.plan.world)]

    def _spread(self, phase: str, rank: int) -> float:
        """How far the steps of a rank lie from their median, in the middle."""
        steps = [getattr(each, phase)[rank] for each in self._window]
        middle = median(steps)
        return median(abs(step - middle) for step in steps)

    def _often(self, phase: SlowPhase, rank: int, peers: Sequence[int]) -> bool:
        """Whether `rank` takes longer than its peers in most steps."""
        units = (
            [count * usual for count, usual in zip(self.counts, self._usually(), strict=True)]
            if phase == SlowPhase.computing
            else [1.0] * self.plan.world
        )
        half = (1.0 + MIN_SLOWDOWN_RATIO) / 2.0
        steps = [
            [seconds / unit for seconds, unit in zip(getattr(each, phase), units, strict=True)] for each in self._window
        ]
        return sum(
            step[rank] > half * median(step[other] for other in peers) for step in steps
        ) >= MIN_SLOW_STEPS_FRACTION * len(steps)

    def _by_sequence(self) -> list[float]:
        return [
            max(seconds, 1e-9) / count for seconds, count in zip(self._middle("computing"), self.counts, strict=True)
        ]

    def _usually(self) -> list[float]:
        """What a sequence should take on each rank, in seconds of a like one."""
        return self._before if self._unlike and self._before else [1.0] * self.plan.world

    def _slow(self) -> list[Straggler]:
        found: list[Straggler] = []
        each, data, waiting = self._by_sequence(), self._middle("data"), self._middle("waiting")
        self._before = self._before or each
        relative = [now / usual for now, usual in zip(each, self._usually(), strict=True)]
        step = max(
            seconds * count + late + wait
            for seconds, count, late, wait in zip(each, self.counts, data, waiting, strict=True)
        )
        alone = self._alone(each)
        for rank in range(self.plan.world):
            peers = [other for other in self._peers(rank) if other != rank]
            if not peers:
                more = (each[rank] - each[rank] / alone[rank]) * self.counts[rank] if rank in alone else 0.0
                if more > max(MIN_STEP_FRACTION * step, MIN_SPREAD_RATIO * self._spread("computing", rank)):
                    found.append(Straggler(rank, SlowPhase.computing, alone[rank], "before"))
                continue
            for phase, seconds, count in (
                (SlowPhase.computing, relative, self.counts[rank] * self._usually()[rank]),
                (SlowPhase.data, data, 1),
            ):
                usual = median(seconds[other] for other in peers)
                often = self._often(phase, rank, peers)
                differing = max(self._spread(phase, other) for other in (rank, *peers))
                if (
                    often
                    and seconds[rank] > MIN_SLOWDOWN_RATIO * usual
                    and (seconds[rank] - usual) * count > max(MIN_STEP_FRACTION * step, MIN_SPREAD_RATIO * differing)
                ):
                    than = "before" if self._unlike and phase == SlowPhase.computing else "its peers"
                    found.append(Straggler(rank, phase, seconds[rank] / max(usual, 1e-6), than))
        if not found and min(data) > MIN_STEP_FRACTION * step:
            found.append(Straggler(-1, SlowPhase.data, min(data) / step))
        longer = median(now / before for now, before in zip(each, self._before, strict=True))
        if not found and self._usual is None:
            self._usual, self._differing = (
                min(waiting),
                max(self._spread("waiting", rank) for rank in range(self.plan.world)),
            )
        elif not found and self._wait_longer(min(waiting), step, max(longer, 1.0)):
            found.append(Straggler(-1, SlowPhase.communication, min(waiting) / max(self._usual or 0.0, 1e-6)))
        return found

    def _wait_longer(self, least: float, step: float, longer: float) -> bool:
        """Whether all wait longer for others than they did, and by more than they compute `longer`. What goes over a
        slow link takes now longer and now shorter: it is
        how much waits differed while all was well that counts."""
        usual = (self._usual or 0.0) * longer
        often = sum(
            min(each.waiting) > (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * usual for each in self._window
        ) >= MIN_SLOW_STEPS_FRACTION * len(self._window)
        return (
            often
            and least > MIN_SLOWDOWN_RATIO * usual
            and least - usual > max(MIN_STEP_FRACTION * step, MIN_SPREAD_RATIO * self._differing)
        )

    def _alone(self, each: list[float]) -> dict[int, float]:
        """How many times as long as in the first window ranks without peers take, beside how the others have changed,
        where that is slow in most steps."""
        changed = [now / before for now, before in zip(each, self._before, strict=True)]
        usual = sorted(changed)[(len(changed) - 1) // 2]
        half = [
            (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * usual * before * count
            for before, count in zip(self._before, self.counts, strict=True)
        ]
        often = [
            sum(step.computing[rank] > most for step in self._window) >= MIN_SLOW_STEPS_FRACTION * MEDIAN_WINDOW_STEPS
            for rank, most in enumerate(half)
        ]
        return {
            rank: times / usual
            for rank, times in enumerate(changed)
            if times > MIN_SLOWDOWN_RATIO * usual and often[rank]
        }

    def _peers(self, rank: int) -> Sequence[int]:
        """The ranks that hold the same stage."""
        place = self.grid.place(rank)
        return [other for other in range(self.plan.world) if self.grid.place(other).pp == place.pp]
