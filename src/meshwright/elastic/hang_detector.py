"""What a run does before its first step, said while it lasts: torch, a model and its data may take a minute, and nobody
should wait for them in silence.

Finds the rank that hangs: the one that gives no sign of life, not those that wait for it.

Four things are looked at from outside, none of which needs the rank to answer: its row of signs of life
(core/heartbeat.py), the state of its
process, how long it stood in line for a core, and, where it does not train, whether it is at work.

Rule: a rank that waits for another says for whom, and again whenever it has looked in vain; so whoever is silent for
longer than its limit and waits for nobody, or has stopped looking, is the culprit. Are
several, then the one that is behind the others in (step, phase). When all that are silent wait for each other in a
circle, they are not in
the same collective: the circle is named. The limit is max(patience, 5 median steps) while a rank trains, longer while
it starts, saves or
evaluates; in the first steps of a generation 5 times the longest of these that any took, and longer until FEW of them
have been seen. A
process stopped by a signal needs no patience beyond a second. Time that a rank stood in line for a core is not silence
of its own: a
machine under load kills nobody.

[Note: at work] What ranks do beside training may take an hour in which none of them says a word: one encodes a corpus,
one reads weights from a
slow disk, and the others wait. So those that do not train are not silent while one of them waits for a disk or moves
bytes (of files, or
memory that it meets for the first time; one call to a disk may take DISK seconds), or computes where there is nobody to
wait for. Where ranks meet, as they join and as they agree on
what to go on from, computing shows nothing: libraries look for each other in endless loops, and one that looks in vain
hangs.

[Note: accelerators] There a rank hands work to its device and waits for others inside of it: it says neither that it
waits nor for whom, and a first
step joins NCCL, loads kernels and may compile them. So limits are longer (`HangLimits`), nobody is judged while one of
them still goes on, and of
those that are all silent one is named only if it alone is behind the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from statistics import median

from meshwright.core.heartbeat import WAIT_INCREMENT, HeartbeatField, RankPhase
from meshwright.core.units import show_seconds
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore

PROGRESS_SECONDS = 10.0
"""Seconds between two lines."""


class StartupProgress:
    """Called several times a second while no rank has begun; says what the rank does that is furthest behind."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.clock = note, clock
        self._began = self._said = self._last = float("-inf")

    def __call__(self, holdings: SharedFileStore) -> None:
        now = self.clock()
        if now > self._last + PROGRESS_SECONDS:  # another start, later in the run
            self._began = self._said = now
        self._last = now
        if now < self._said + PROGRESS_SECONDS:
            return
        self._said = now
        phase, rank = min(zip(holdings.column(HeartbeatField.phase), range(holdings.world), strict=True))
        if phase < RankPhase.build:
            words = "processes start and load torch"
        else:
            words = (
                f"rank {rank} builds the model and opens its data"
                if phase == RankPhase.build
                else f"rank {rank} reads what it goes on from"
            )
        self.note(f"starting, {show_seconds(now - self._began)}: {words}")


TIMEOUT_STEPS = 5
"""Median steps of silence while training."""

WARMUP_STEPS = 3
"""Steps of a generation that the others are not judged by: they warm up."""


@dataclass(frozen=True)
class HangLimits:
    """On which ranks are judged, by the kind of their devices."""

    patience: float
    """Seconds of silence in training that mean nothing."""
    otherwise: float
    """The same outside of training and in steps of which nobody knows how long they take: starting, saving, evaluating
    have no measure."""
    last: RankPhase
    """Up to it they train."""
    tell: bool
    """Whether they say whom they wait for."""


CPU_LIMITS = HangLimits(0.0, 60.0, RankPhase.compare, tell=True)
ACCELERATOR_LIMITS = HangLimits(30.0, 300.0, RankPhase.update, tell=False)
"""Comparing brings what ranks hold alike through the memory of the host, or over all of it: seconds for 16 GB."""

BUSY_CPU_SECONDS, BUSY_IO_BYTES = 0.5, 1 << 20
"""Seconds of computing, and bytes, that show a rank to be at work. One that waits looks about it some times a second:
that is much less a minute."""

DISK_TIMEOUT_SECONDS = 1200.0
"""Seconds that one call to a disk may take before its rank counts as hung: a disk that is mounted over a network may
never answer."""

INDEPENDENT_PHASES = (RankPhase.start, RankPhase.build, RankPhase.sample)
"""Where a rank waits for no other."""

PHASE_TEXTS = {
    RankPhase.join: "joining the others, ",
    RankPhase.data: "reading its data, ",
    RankPhase.prove: "proving its plan, ",
}
"""What is said of where it hangs."""

STOPPED_PROCESS_SECONDS = 0.8
"""Seconds for a process that a signal has stopped, so that its rank is named within one."""


MAX_RANKS_PER_SECOND = 8192
"""Ranks that are looked at in a second, at most: more than 800 less often than ten times a second, so that looking
costs a hundredth of a core."""


@dataclass(frozen=True)
class HangReport:
    """`silent`: seconds since the culprit's last sign of life."""

    rank: int
    """-1: nobody knows whose fault it is."""
    silent: float
    words: str


@dataclass
class StepPace:
    """How long steps take under one plan; it outlives a generation. `first`: the longest of the first FEW of any
    generation; `early`: how many of these there were."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    first: float = 0.0
    early: int = 0

    def count(self, number: int, seconds: float) -> None:
        """Step `number` of a generation, from 0."""
        if number < WARMUP_STEPS:
            self.first, self.early = max(self.first, seconds), self.early + 1
        else:
            self.steps.append(seconds)

    @property
    def is_known(self) -> bool:
        """Generations may all be too short to get beyond their first steps: hang follows hang."""
        return bool(self.steps) or self.early >= WARMUP_STEPS

    @property
    def typical(self) -> float:
        return TIMEOUT_STEPS * (median(self.steps) if self.steps else self.first)


@dataclass
class _ObservedField:
    """A word of a rank's row, since when it stands there, and how long the rank had stood in line by then."""

    word: int
    at: float
    in_line: float


@dataclass
class HangDetector:
    """Of one generation. `look` is called several times a second."""

    holdings: SharedFileStore
    patience: float
    clock: Callable[[], float] = time.monotonic
    signs: Callable[[int], ProcStats] = read_proc_stats
    """Of a rank's process, wherever it runs."""
    pace: StepPace = field(default_factory=StepPace)
    blind: Callable[[], bool] = lambda: False
    """Whether signs of life cannot arrive: a node has not been heard. Nobody is judged meanwhile, for all wait for its
    ranks."""
    terms: HangLimits = CPU_LIMITS
    _seen: dict[int, _ObservedField] = field(default_factory=dict)
    _waits: dict[int, _ObservedField] = field(default_factory=dict)
    _first: list[int] = field(default_factory=list)
    _work: dict[int, ProcStats] = field(default_factory=dict)
    _disk: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of a rank that waits for its disk: the bytes that it had moved when that began, and when that was."""
    _step: int = 0
    _warm: int = 0
    _next: float = float("-inf")

    def __post_init__(self) -> None:
        self._first = self.holdings.column(HeartbeatField.beat)

    def look(self, living: Mapping[int, int]) -> HangReport | None:
        """`living`: the process of each rank."""
        if not self.patience:
            return None
        now = self.clock()
        if now < self._next:
            return None
        self._next = now + max(0.0, self.holdings.world / MAX_RANKS_PER_SECOND - 0.1)
        if self.blind() or not all(living.values()):  # one that is yet to be forked is waited for
            for before in (*self._seen.values(), *self._waits.values()):
                before.at = now
            return None
        self._count_steps()
        self._excuse(living, now)
        silent: dict[int, float] = {}
        beats, waits, signs = (
            self.holdings.column(HeartbeatField.beat),
            self.holdings.column(HeartbeatField.waits),
            self.signs,
        )
        for rank, process in living.items():
            beat, word = beats[rank], waits[rank]
            seen, waited = self._seen.get(rank), self._waits.get(rank)
            if waited is None or waited.word != word:
                self._waits[rank] = _ObservedField(word, now, signs(process).in_line if word else 0.0)
            if seen is None or seen.word != beat:
                self._seen[rank] = _ObservedField(beat, now, signs(process).in_line)
            else:
                silent[rank] = now - seen.at
        shortest = min(self._limits)
        if max(silent.values(), default=0.0) <= shortest or all(
            seen.word == self._first[rank] for rank, seen in self._seen.items()
        ):
            return None  # nobody has said a word: they may be such as never do
        _, *running = self._limits
        shortest = min(running)
        late = {
            rank: seconds
            for rank, seconds in silent.items()
            if (seconds > shortest or signs(living[rank]).state == "T") and seconds > self._limit(rank, living[rank])
        }
        late = {
            rank: own
            for rank in late
            if (own := late[rank] - (self.signs(living[rank]).in_line - self._seen[rank].in_line))
            > self._limit(rank, living[rank])
        }
        return self._judge(late, silent, living) if late else None

    def _excuse(self, living: Mapping[int, int], now: float) -> None:
        """None of those that do not train has been silent where one of them, that waits for no other, is at work
        ([Note: at work])."""
        beside: dict[int, ProcStats] = {}
        at_work = False
        first, last = RankPhase.data, self.terms.last
        idle = [
            rank for rank, phase in enumerate(self.holdings.column(HeartbeatField.phase)) if not first <= phase <= last
        ]
        for rank in idle:
            if rank not in living or rank not in self._seen:
                continue
            pulse, signs = self.holdings.pulse(rank), self.signs(living[rank])
            if signs.state == "T":
                continue
            beside[rank], before = signs, self._work.setdefault(rank, signs)
            moved, since = self._disk.get(rank, (signs.moved, now))
            if signs.state != "D" or signs.moved - moved > BUSY_IO_BYTES:
                moved, since = signs.moved, now
            self._disk[rank] = moved, since
            waits_for_disk = signs.state == "D" and now - since < DISK_TIMEOUT_SECONDS
            computes = (
                pulse.read(HeartbeatField.phase) in INDEPENDENT_PHASES
                and signs.computed - before.computed > BUSY_CPU_SECONDS
            )
            if pulse.read(HeartbeatField.waits) % WAIT_INCREMENT == 0 and (
                computes or waits_for_disk or signs.moved - before.moved > BUSY_IO_BYTES
            ):
                at_work = True
        for rank, signs in beside.items() if at_work else ():
            self._seen[rank] = _ObservedField(self._seen[rank].word, now, signs.in_line)
            self._work[rank] = signs

    def _count_steps(self) -> None:
        """By what ranks say of them: several may pass between two looks, and a generation may end between the next
        two."""
        step, took = max(
            zip(self.holdings.column(HeartbeatField.step), self.holdings.column(HeartbeatField.took), strict=True)
        )
        if step > self._step and took:
            self._warm += step - self._step if self._step else 1
            self.pace.count(self._warm - 1, 1e-6 * took)
            self._step = step

    @property
    def _limits(self) -> tuple[float, float, float]:
        """Of a rank that a signal has stopped, of one that trains, and of any other."""
        typical, other = self.pace.typical, max(self.terms.otherwise, 10 * self.patience)
        warm = TIMEOUT_STEPS * self.pace.first if self._warm < WARMUP_STEPS else 0.0
        trains = max(self.patience, self.terms.patience, warm) if self.pace.is_known else other
        return max(STOPPED_PROCESS_SECONDS, typical), max(trains, typical), max(other, typical)

    def _limit(self, rank: int, process: int) -> float:
        stopped, trains, other = self._limits
        return stopped if self.signs(process).state == "T" else trains if self._trains(rank) else other

    def _judge(
        self, late: Mapping[int, float], silent: Mapping[int, float], living: Mapping[int, int]
    ) -> HangReport | None:
        if not self.terms.tell and not any(self.signs(living[rank]).state == "T" for rank in late):
            return self._behind(late.keys(), silent, living)
        waits = {rank: self.holdings.pulse(rank).read(HeartbeatField.waits) % WAIT_INCREMENT - 1 for rank in living}
        guilty = [
            rank
            for rank in late
            if waits[rank] < 0 or self.signs(living[rank]).state == "T" or self._stands(rank, living[rank])
        ]
        if guilty:
            rank = min(guilty, key=lambda rank: (self._place(rank), -late[rank]))
            if any(
                self._place(other) < self._place(rank) and not self._trains(other)
                for other in living.keys() - late.keys()
            ):
                return None  # that one has longer, and whoever waits for it cannot always say so
            return HangReport(
                rank,
                silent[rank],
                f"hung: {self._why(rank, living[rank])}no sign of life for {show_seconds(silent[rank])}",
            )
        for start in late:
            path = [start]
            while (following := waits.get(path[-1], -1)) >= 0 and following not in path:
                path.append(following)
            circle = path[path.index(following) :] if following in path else []
            if circle and all(rank in late for rank in circle):
                words = " waits for ".join(f"rank {rank}" for rank in (*circle, circle[0]))
                return HangReport(circle[0], silent[circle[0]], f"hung: {words}: they are not in the same collective")
        return None

    def _behind(self, late: Set[int], silent: Mapping[int, float], living: Mapping[int, int]) -> HangReport | None:
        """Of ranks that do not say whom they wait for the one that is behind all others; nobody while one of them goes
        on."""
        if late < living.keys():
            return None
        first, *others = sorted(living, key=self._place)
        if not others or self._place(first) < self._place(others[0]):
            return HangReport(
                first,
                silent[first],
                f"hung: {self._why(first, living[first])}no sign of life for {show_seconds(silent[first])}",
            )
        shortest = min(silent.values())
        return HangReport(
            -1, shortest, f"hung: no sign of life for {show_seconds(shortest)}, and no rank is behind the others"
        )

    def _stands(self, rank: int, process: int) -> bool:
        """Whether `rank` says that it waits but has not looked again for half its limit, though it had a core."""
        seen = self._waits[rank]
        return self.clock() - seen.at - (self.signs(process).in_line - seen.in_line) > 0.5 * self._limit(rank, process)

    def _trains(self, rank: int) -> bool:
        return RankPhase.data <= self.holdings.pulse(rank).read(HeartbeatField.phase) <= self.terms.last

    def _place(self, rank: int) -> tuple[int, int]:
        pulse = self.holdings.pulse(rank)
        return pulse.read(HeartbeatField.step), pulse.read(HeartbeatField.phase)

    def _why(self, rank: int, process: int) -> str:
        if self.signs(process).state == "T":
            return "stopped by a signal, "
        return PHASE_TEXTS.get(RankPhase(self.holdings.pulse(rank).read(HeartbeatField.phase)), "")
