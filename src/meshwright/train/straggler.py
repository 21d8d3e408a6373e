"""Detects stragglers from the times that every rank measures, and computes numbers of micro-batches per replica that
compensate for them. The training loop (loop.py) uses it.

A diagnosis names one of three phases:

    computing      A device computes longer than its peers. Computing is the time of a step without waits for data or
                   for other ranks.
    data           A rank waits longer for its batch than its peers, due to a slow data loader or disk. If all ranks
                   wait, the shortest wait counts.
    communication  All ranks wait longer for others but do not compute longer, so a link is slow. Then the bandwidths of
                   the links are measured to find it.

All values are medians over a window of MEDIAN_WINDOW_STEPS steps. The peers of a rank are the other ranks of its
pipeline stage. The excess of a rank is its time minus the median time of its peers. The spread of a rank is the median
distance of its times from their median. A rank is a straggler if all of these hold:
- It takes more than MIN_SLOWDOWN_RATIO times the median of its peers.
- Its excess is more than MIN_STEP_FRACTION of the step.
- Its excess is more than MIN_SPREAD_RATIO times the largest spread among the rank and its peers.
- In at least MIN_SLOW_STEPS_FRACTION of the steps, it takes more than (1 + MIN_SLOWDOWN_RATIO) / 2 times the median of
  its peers.

The last two conditions prevent a diagnosis if other programs take CPU cores from one rank after another: the times of
one rank then vary between steps as much as times vary between ranks.

Computing times are compared per sequence, since peers may have different numbers of micro-batches. A diagnosis is
reported when it has been unchanged for CONFIRMATION_STEPS steps. When all ranks are healthy again, this is reported
too. If the first plan has uneven gradient accumulation, the devices are assumed to be heterogeneous, and computing
times are relative to the first window. If a stage has only one rank, the change of its time since the first window is
compared with that of the other stages. All ranks have the same values, so they reach the same diagnosis without an
exchange.

[Note: adjusted shares] Replicas synchronize once per step, so they may have different numbers of micro-batches. If the
user sets `run.balance`, these numbers are adapted to the speeds of the replicas at a step boundary. Only the assignment
of rows to ranks changes, so the loss stays that of one device. But the order of its sums changes, so such a run is not
reproducible bit for bit.

Whole micro-batches may be too coarse. For example, four replicas have 16 micro-batches, and one replica takes 1.5 times
as long as the others. The best division is 5-4-4-3, with which a step takes 15 % longer than if the batch could be
divided exactly by speed. If half micro-batches save more than MIN_GAIN_FRACTION of the step, the new plan uses half
micro-batches. The micro-batch size of a replica is the largest divisor of its number of sequences that does not exceed
its size in the first plan.

The optimizer update takes equally long for few and for many sequences, so a rank with few sequences seems slow per
sequence. Therefore, when no straggler is left, the first plan is predicted to reach the step time of the first window
again. This prediction is used only if the measured speeds would not delay the first plan much: its computing may take
at most (1 + MIN_SLOWDOWN_RATIO) / 2 times as long as that of the current plan.

[Note: ranks that are left out] If no division of the batch helps, the monitor sends an `ExclusionRequest`. It does so
after EXCLUSION_DELAY_STEPS slow steps, and then once per window. The request has the current step time, and the
predicted step time if the slow ranks computed as fast as their peers. The supervisor decides (elastic/devices.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import gcd
from statistics import median
from typing import NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.spec.grid import RankGrid, micro_batch_rows, micro_batches_by_speed
from meshwright.spec.plan import Plan

MEDIAN_WINDOW_STEPS = 10
MIN_SLOWDOWN_RATIO, MIN_STEP_FRACTION = 1.3, 0.1
MIN_SPREAD_RATIO, MIN_SLOW_STEPS_FRACTION, CONFIRMATION_STEPS = 4.0, 0.9, 8
MIN_GAIN_FRACTION = 0.05
"""A new division of the batch must be predicted to save at least this fraction of the step time."""

EXCLUSION_DELAY_STEPS = 20
"""A rank must stay slow for this number of steps after the diagnosis before its exclusion is requested."""

WARMUP_STEPS = 2
"""The first steps of a launch are not measured, since they allocate buffers and fill caches."""

MEASURED_GAIN_TEXT = mark_msgid(
    "step {step}: {plan}: steps are {found:.2f} times as fast as before (predicted: {times:.2f} times)"
)
CHANGED_PLAN_TEXT = mark_msgid(
    "step {step}: the run changes to {plan}; steps are predicted to be {times:.2f} times as fast as now"
)
ALL_HEALTHY_TEXT = Message("no rank delays the others any more")


class SlowPhase(StrEnum):
    """The phase of a step in which a rank is slow."""

    computing = "computing"
    data = "data"
    communication = "communication"


class PhaseSeconds(NamedTuple):
    """The seconds of one step by phase and rank. `waiting`: for other ranks."""

    computing: tuple[float, ...]
    data: tuple[float, ...]
    waiting: tuple[float, ...]


class Straggler(NamedTuple):
    """A slow rank, or all ranks if `rank` is -1. `times` is the ratio of its time to the time of its peers, or to its
    own earlier time; `than` says which. If all ranks wait for data, `times` is the fraction of a step that they
    wait."""

    rank: int
    phase: SlowPhase
    times: float
    than: str = Message("its peers")

    @property
    def words(self) -> str:
        """Returns the diagnosis as one line for the user."""
        if self.rank < 0 and self.phase == SlowPhase.data:
            return Message(
                "every rank waits for its data for {share:.0f} % of a step: the data loaders are slow",
                share=100 * self.times,
            )
        if self.rank < 0:
            return Message(
                "every rank waits {times:.1f} times as long for the others as before: a link is slow", times=self.times
            )
        return Message(
            "rank {rank} computes {times:.1f} times as long as {than}"
            if self.phase == SlowPhase.computing
            else "rank {rank} waits for its data {times:.1f} times as long as {than}",
            rank=self.rank,
            times=self.times,
            than=self.than,
        )


class ExclusionRequest(NamedTuple):
    """A request to exclude slow ranks. `times`: the largest ratio of their computing time to that of their peers.
    `seconds`: the current step time. `without`: the predicted step time if these ranks computed as fast as their
    peers."""

    ranks: tuple[int, ...]
    times: float
    seconds: float
    without: float


@dataclass
class HealthyTimes:
    """Times of this launch in seconds, with which later times are compared. Each has its default until it is
    measured."""

    step: float = 0.0
    """The median step time of the first window."""
    computing: list[float] = field(default_factory=list)
    """The computing time per sequence in the first window, by rank."""
    waiting: float | None = None
    """The shortest wait of any rank for others in the first window without a straggler."""
    waiting_spread: float = 0.0
    """The largest spread of any rank's waits in that window."""


class StragglerMonitor:
    """Diagnoses stragglers in one launch. All ranks construct it and make equal calls. `say` receives lines for the
    user. `tell` receives messages for the supervisor: the kind of message and its fields."""

    def __init__(
        self,
        plan: Plan,
        batch: int,
        say: Callable[[str], None] = lambda _: None,
        tell: Callable[..., None] = lambda *_, **__: None,
        halves: bool = True,
        links: Callable[[], Sequence[tuple[tuple[int, ...], str]]] = tuple,
    ) -> None:
        """`batch`: the number of sequences in the global batch. `halves`: whether micro-batches may become smaller.
        Exact sums, a load-balancing loss, batch statistics, DiLoCo and compiled blocks exclude this. `links`: measures
        the links on all ranks together, and returns the ranks and a description of each slow link."""
        self.batch, self.say, self.tell, self.slow = batch, say, tell, frozenset[tuple[int, SlowPhase]]()
        self.first, self.halves, self.links = plan, halves and not plan.compile, links
        self.grid = RankGrid(plan)
        self.follow(plan)
        self._seen = self._steady = self._since = 0
        self._found = frozenset[tuple[int, SlowPhase]]()
        self._healthy = HealthyTimes()
        self._is_heterogeneous = len(set(self.counts)) > 1

    def follow(self, plan: Plan) -> None:
        """Starts a new window under `plan`, which differs from the first plan at most in its micro-batches."""
        self.plan, self._window = plan, deque[PhaseSeconds](maxlen=MEDIAN_WINDOW_STEPS)
        self._expected: tuple[float, float] | None = None
        rows = self._rows(plan)
        self.counts = [rows[self.grid.replica(rank)] for rank in range(plan.world)]

    def heed(self, phases: PhaseSeconds, step: int, balance: bool) -> Plan | None:
        """Processes the times of step `step` and reports a change of the diagnosis. With `balance`, returns a better
        plan for the next steps, if there is one. Otherwise returns None."""
        found = self.hear(phases)
        self._compare(step)
        if found is not None:
            said: list[tuple[tuple[int, ...], str]] = [
                ((slow.rank,) if slow.rank >= 0 else (), slow.words) for slow in found
            ] or [((), ALL_HEALTHY_TEXT)]
            said += self.links() if any(slow.phase == SlowPhase.communication for slow in found) else ()
            for ranks, words in said:
                self.say(Message("step {step}: {words}", step=step, words=words))
                self.tell("verdict", step=step, ranks=ranks, words=words)
        changed = bool(self.slow) or self.plan != self.first
        # The speed of a known straggler may change, so the division is computed again once per window.
        again = found is None and changed and self._seen % MEDIAN_WINDOW_STEPS == 0
        better = self.better() if balance and (found is not None or again) else None
        if better is None or (again and better[1] < 1.0 + 2 * MIN_GAIN_FRACTION):
            if balance and again and (requested := self.asks()) is not None:
                self.tell("slow", step=step, plan=self.plan.name, **requested._asdict())
            return None
        plan, times = better
        self.say(Message(CHANGED_PLAN_TEXT, step=step, plan=plan.name, times=times))
        self.tell("rebalanced", step=step, plan=plan.name, predicted=times)
        expected = (self._seconds(), times)
        self.follow(plan)
        self._expected = expected
        return plan

    def _compare(self, step: int) -> None:
        """Reports the measured and the predicted speed-up of a new plan, as soon as a window of steps under this plan
        is complete."""
        if self._expected is not None and len(self._window) == MEDIAN_WINDOW_STEPS:
            before, times = self._expected
            self._expected, found = None, before / self._seconds()
            self.say(Message(MEASURED_GAIN_TEXT, step=step, plan=self.plan.name, found=found, times=times))
            self.tell("rebalance_result", step=step, plan=self.plan.name, predicted=times, measured=found)

    def _seconds(self) -> float:
        """Returns the median over the window of the slowest rank's step time, in seconds."""
        return median(max(map(sum, zip(*each, strict=True))) for each in self._window)

    def hear(self, phases: PhaseSeconds) -> list[Straggler] | None:
        """Adds the times of a step. Returns the new diagnosis if it has changed, else None. A diagnosis is a list of
        stragglers, the worst first; it is empty if all ranks are healthy again."""
        self._seen += 1
        if self._seen <= WARMUP_STEPS:
            return None
        self._window.append(phases)
        if len(self._window) < MEDIAN_WINDOW_STEPS:
            return None
        self._healthy.step = self._healthy.step or self._seconds()
        found = sorted(self._slow(), key=lambda slow: -slow.times)
        now = frozenset((slow.rank, slow.phase) for slow in found)
        self._steady, self._found = self._steady + 1 if now == self._found else 1, now
        if self._steady < CONFIRMATION_STEPS or now == self.slow:
            return None
        self.slow, self._since = now, self._seen
        return found

    def asks(self) -> ExclusionRequest | None:
        """Returns a request to exclude ranks that computed slowly for EXCLUSION_DELAY_STEPS steps, or None ([Note:
        ranks that are left out]). Also None if this would save less than MIN_STEP_FRACTION of a step."""
        slow = {rank for rank, phase in self.slow if phase == SlowPhase.computing}
        now = {each.rank: each.times for each in self._slow() if each.phase == SlowPhase.computing}
        others = [rank for rank in range(self.plan.world) if rank not in slow]
        if not slow or not others or slow != now.keys() or self._seen < self._since + EXCLUSION_DELAY_STEPS:
            return None
        busy = self._middle("computing")
        usual = [
            max(busy[other] for other in stored)
            if (stored := set(self._peers(rank)) - slow)
            else busy[rank] / now[rank]
            for rank in slow
        ]
        seconds = self._seconds()
        longer = max(busy[rank] - each for rank, each in zip(slow, usual, strict=True))
        if longer < MIN_STEP_FRACTION * seconds:
            return None
        return ExclusionRequest(tuple(sorted(slow)), max(now.values()), seconds, seconds - longer)

    def better(self) -> tuple[Plan, float] | None:
        """Returns the plan with the shortest predicted step time and its predicted speed-up ([Note: adjusted shares]).
        Returns None if the plan saves less than MIN_GAIN_FRACTION of the step, if the window is incomplete, or if there
        is only one replica."""
        if len(self._window) < MEDIAN_WINDOW_STEPS or self.plan.dp < 2:
            return None
        each = self._by_sequence()
        replicas = [
            max(each[rank] for rank in range(self.plan.world) if self.grid.replica(rank) == replica)
            for replica in range(self.plan.dp)
        ]
        end = lambda rows: max(count * seconds for count, seconds in zip(rows, replicas, strict=True))
        stored = self._rows(self.plan)
        shared = self._shared(replicas, 1)
        if self.halves and end(finer := self._shared(replicas, 2)) < (1.0 - MIN_GAIN_FRACTION) * end(shared):
            shared = finer
        before, after = end(stored), end(shared)
        step = before + median(
            self._middle("waiting")[rank]
            for rank in range(self.plan.world)
            if self.grid.replica(rank) == replicas.index(max(replicas))
        )
        expected = {self.plan: step}
        if before - after >= MIN_GAIN_FRACTION * step and (adjusted := self._of(shared)) is not None:
            expected[adjusted] = step - before + after
        if (
            self._healthy.step
            and not self.slow
            and self.plan != self.first
            and end(self._rows(self.first)) <= (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * before
        ):
            expected[self.first] = min(self._healthy.step, expected.get(self.first, step))
        plan = min(expected, key=expected.__getitem__)
        return (plan, step / expected[plan]) if step - expected[plan] >= MIN_GAIN_FRACTION * step else None

    def _rows(self, plan: Plan) -> list[int]:
        """Returns the number of sequences per step of each replica under `plan`."""
        return [sum(size for _, size in micro_batch_rows(plan, self.batch, replica)) for replica in range(plan.dp)]

    def _shared(self, seconds: Sequence[float], parts: int) -> list[int]:
        """Returns the number of sequences of each replica, in inverse proportion to `seconds`, its seconds per
        sequence. Each number is a multiple of the greatest common divisor of the first plan's micro-batch
        sizes, or of this divisor / `parts` if `parts` divides it."""
        unit = gcd(self.first.micro_batch, *self.first.micro_batch_sizes)
        unit = unit // parts if unit % parts == 0 else unit
        return [unit * count for count in micro_batches_by_speed([1.0 / each for each in seconds], self.batch // unit)]

    def _of(self, rows: Sequence[int]) -> Plan | None:
        """Returns a plan under which replica r reads `rows[r]` sequences, or None if such a plan is not valid. It has
        as few micro-batches as possible, none of them larger than in the first plan."""
        most = [self.first.micro_batch_of(replica) for replica in range(self.first.dp)]
        sizes = [
            max(size for size in range(1, limit + 1) if stored % size == 0)
            for stored, limit in zip(rows, most, strict=True)
        ]
        counts = [stored // size for stored, size in zip(rows, sizes, strict=True)]
        different = [values if len(set(values)) > 1 else () for values in (sizes, counts)]
        try:
            return self.first.but(
                micro_batch=max(sizes), micro_batch_sizes=tuple(different[0]), shares=tuple(different[1])
            )
        except InputError:
            return None

    def _middle(self, phase: str) -> list[float]:
        """Returns the median over the window of the seconds in `phase`, by rank."""
        return [median(getattr(each, phase)[rank] for each in self._window) for rank in range(self.plan.world)]

    def _spread(self, phase: str, rank: int) -> float:
        """Returns the spread of a rank's times in `phase`: their median distance from their median, in seconds."""
        steps = [getattr(each, phase)[rank] for each in self._window]
        middle = median(steps)
        return median(abs(step - middle) for step in steps)

    def _often(self, phase: SlowPhase, rank: int, peers: Sequence[int]) -> bool:
        """Returns whether `rank` takes clearly longer than its peers in most steps of the window (the last condition in
        the module docstring)."""
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
        """Returns the divisor of the computing times by rank. On heterogeneous devices it is the rank's seconds per
        sequence in the first window, on homogeneous devices 1.0."""
        return (
            self._healthy.computing if self._is_heterogeneous and self._healthy.computing else [1.0] * self.plan.world
        )

    def _slow(self) -> list[Straggler]:
        found: list[Straggler] = []
        each, data, waiting = self._by_sequence(), self._middle("data"), self._middle("waiting")
        self._healthy.computing = self._healthy.computing or each
        relative = [now / usual for now, usual in zip(each, self._usually(), strict=True)]
        step = max(
            seconds * count + delayed + wait
            for seconds, count, delayed, wait in zip(each, self.counts, data, waiting, strict=True)
        )
        single = self._slowdown_without_peers(each)
        for rank in range(self.plan.world):
            peers = [other for other in self._peers(rank) if other != rank]
            if not peers:
                more = (each[rank] - each[rank] / single[rank]) * self.counts[rank] if rank in single else 0.0
                if more > max(MIN_STEP_FRACTION * step, MIN_SPREAD_RATIO * self._spread("computing", rank)):
                    found.append(Straggler(rank, SlowPhase.computing, single[rank], "before"))
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
                    than = (
                        Message("before")
                        if self._is_heterogeneous and phase == SlowPhase.computing
                        else Message("its peers")
                    )
                    found.append(Straggler(rank, phase, seconds[rank] / max(usual, 1e-6), than))
        if not found and min(data) > MIN_STEP_FRACTION * step:
            found.append(Straggler(-1, SlowPhase.data, min(data) / step))
        longer = median(now / before for now, before in zip(each, self._healthy.computing, strict=True))
        if not found and self._healthy.waiting is None:
            self._healthy.waiting, self._healthy.waiting_spread = (
                min(waiting),
                max(self._spread("waiting", rank) for rank in range(self.plan.world)),
            )
        elif not found and self._wait_longer(min(waiting), step, max(longer, 1.0)):
            found.append(Straggler(-1, SlowPhase.communication, min(waiting) / max(self._healthy.waiting or 0.0, 1e-6)))
        return found

    def _wait_longer(self, least: float, step: float, longer: float) -> bool:
        """Returns whether all ranks wait longer for others than when all were healthy, by the conditions of stragglers
        (module docstring). `least`: the shortest wait, `step`: the step time, in seconds. `longer`: the factor by which
        computing and so waits may grow. The spread is taken from healthy waits, since waits on a slow link vary."""
        usual = (self._healthy.waiting or 0.0) * longer
        often = sum(
            min(each.waiting) > (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * usual for each in self._window
        ) >= MIN_SLOW_STEPS_FRACTION * len(self._window)
        return (
            often
            and least > MIN_SLOWDOWN_RATIO * usual
            and least - usual > max(MIN_STEP_FRACTION * step, MIN_SPREAD_RATIO * self._healthy.waiting_spread)
        )

    def _slowdown_without_peers(self, each: list[float]) -> dict[int, float]:
        """Returns the slowdown of ranks since the first window, relative to the median change of all ranks. Only ranks
        that are slow in most steps are included. The result is used for ranks without peers. `each`: the current
        seconds per sequence by rank."""
        changed = [now / before for now, before in zip(each, self._healthy.computing, strict=True)]
        usual = sorted(changed)[(len(changed) - 1) // 2]
        half = [
            (1.0 + MIN_SLOWDOWN_RATIO) / 2.0 * usual * before * count
            for before, count in zip(self._healthy.computing, self.counts, strict=True)
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
        """Returns the ranks of the pipeline stage of `rank`, including `rank`."""
        place = self.grid.place(rank)
        return [other for other in range(self.plan.world) if self.grid.place(other).pp == place.pp]
