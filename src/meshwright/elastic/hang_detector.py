"""Detects which rank of a run hangs, and reports the progress of a slow start. The supervisor calls it several times a
second.

`StartupProgress` reports what a run does before its first step. Loading torch, a model and its data may take a minute.

`HangDetector` names the rank that makes no progress, not the ranks that wait for it. It needs no response from a rank.
It observes the rank's heartbeat row (core/ipc.py), the state of its process and its time in the run queue. Outside of
training, it also observes whether the rank is at work.

A rank is silent while its heartbeat does not change. If it waits for another rank, it writes two values to its
heartbeat row: the index of the awaited rank, and a count of its checks for the awaited data. The culprit has been
silent for longer than its limit, and it waits for no rank or has stopped checking. If there are several such ranks, the
one furthest behind in (step, phase) is named. If silent ranks wait for each other in a cycle, they are in different
collectives, and the cycle is reported.

The limit of a rank that trains is `patience` seconds (an argument) or the duration of TIMEOUT_STEPS median steps,
whichever is longer. The limit is longer while the rank starts, saves or evaluates. In the first steps of a generation
(start of all ranks), it is at least TIMEOUT_STEPS times the longest warm-up step so far. Until WARMUP_STEPS steps have
been observed, it is even longer. If a signal has stopped a process, its limit is shorter (STOPPED_PROCESS_SECONDS).
Time in the run queue does not count as silence, so that no rank is killed because its machine is overloaded. Nor does
the time while a node sends nothing, and as long again afterwards: TCP doubles the time between two attempts to send, so
connections may stay silent after an outage for as long as it lasted.

[Note: at work] Work outside of training may take an hour without a heartbeat: one rank encodes a corpus or reads
weights from a slow disk, and all others wait. So while a rank is at work, no rank outside of training counts as silent.
A rank is at work if one of these holds:
- It waits for a disk, for at most DISK_TIMEOUT_SECONDS per call.
- It reads or writes files, or accesses new pages of mapped memory.
- It uses CPU time in one of INDEPENDENT_PHASES. In other phases, such as joining or restoring, CPU time proves nothing:
  a library that waits for a hung rank polls and so uses CPU time.

[Note: accelerators] With accelerators, a rank waits for other ranks inside of kernels, so it cannot publish that it
waits. A first step initializes NCCL, loads kernels and may compile them. So limits are longer (`HangLimits`), and no
rank is reported while any rank makes progress. If all ranks are silent, a rank is named only if it alone is furthest
behind.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from statistics import median

from meshwright.core.ipc import WAIT_INCREMENT, HeartbeatField, RankPhase
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.units import show_seconds
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore

PROGRESS_SECONDS = 10.0
"""The time between two lines about a slow start."""


class StartupProgress:
    """Reports to `note` what the rank that is furthest behind is doing. The supervisor calls it several times a second
    until a rank begins to train."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.clock = note, clock
        self._began = self._said = self._last = float("-inf")

    def __call__(self, holdings: SharedFileStore) -> None:
        now = self.clock()
        if now > self._last + PROGRESS_SECONDS:  # the ranks have trained since the last call and start again
            self._began = self._said = now
        self._last = now
        if now < self._said + PROGRESS_SECONDS:
            return
        self._said = now
        phase, rank = min(zip(holdings.column(HeartbeatField.phase), range(holdings.world), strict=True))
        if phase < RankPhase.build:
            words = Message("processes start and load torch")
        else:
            words = (
                Message("rank {rank} builds the model and opens its data", rank=rank)
                if phase == RankPhase.build
                else Message("rank {rank} loads the state that it resumes from", rank=rank)
            )
        self.note(Message("starting, {now}: {words}", now=show_seconds(now - self._began), words=words))


TIMEOUT_STEPS = 5
"""A rank that trains may be silent for the duration of this number of median steps."""

WARMUP_STEPS = 3
"""This number of first steps of a generation (warm-up steps) does not count towards the median."""


@dataclass(frozen=True)
class HangLimits:
    """The limits of silence for ranks on one type of device, in seconds."""

    patience: float
    """The minimum limit during training."""
    otherwise: float
    """The minimum limit in steps of unknown duration and outside of training (start, save, evaluation)."""
    last: RankPhase
    """Phases from `data` to this phase count as training."""
    tell: bool
    """Whether a rank that waits writes the index of the awaited rank to its heartbeat row."""
    kill: float
    """The supervisor waits at most this long for killed ranks to end."""


KILL_SECONDS, ACCELERATOR_KILL_SECONDS = 5.0, 60.0
"""The driver of an accelerator unpins the memory of a killed rank page by page, 100 GB of it for a rank with offloaded
states."""

CPU_LIMITS = HangLimits(0.0, 60.0, RankPhase.compare, tell=True, kill=KILL_SECONDS)
ACCELERATOR_LIMITS = HangLimits(30.0, 300.0, RankPhase.update, tell=False, kill=ACCELERATOR_KILL_SECONDS)
"""On accelerators, the phase `compare` does not count as training: it reads all replicated tensors, which takes seconds
for 16 GB."""

BUSY_CPU_SECONDS, BUSY_IO_BYTES = 0.5, 1 << 20
"""A rank is at work if it has used more CPU time or moved more bytes than this since its last heartbeat. A waiting rank
polls a few times a second and uses much less in a minute."""

DISK_TIMEOUT_SECONDS = 1200.0
"""A rank counts as hung if one disk call takes longer than this, since a network file system may never respond."""

INDEPENDENT_PHASES = (RankPhase.start, RankPhase.build, RankPhase.sample)
"""In these phases, a rank does not wait for other ranks."""

PHASE_TEXTS = {
    RankPhase.join: mark_msgid("hung: joining the others, no sign of life for {silent:seconds}"),
    RankPhase.data: mark_msgid("hung: reading its data, no sign of life for {silent:seconds}"),
    RankPhase.prove: mark_msgid("hung: proving its plan, no sign of life for {silent:seconds}"),
}
"""The message about a hang, by the phase of the rank."""

STOPPED_PROCESS_SECONDS = 0.8
"""The minimum limit of silence for a process that a signal has stopped. With it, the rank is named within a second."""


FORK_SERVER_SECONDS = 300.0
"""A fork server may load torch for this time before it is ready, or before a rank that it must start has a process."""

MAX_RANKS_PER_SECOND = 8192
"""At most this number of rank checks is made per second, which takes 1 % of a CPU core. With more than 800 ranks, each
rank is therefore checked less than ten times a second."""


@dataclass(frozen=True)
class HangReport:
    """A detected hang. `silent`: the seconds since the last heartbeat of the culprit. `words`: the text for the
    user."""

    rank: int
    """The culprit, or -1 if it is unknown."""
    silent: float
    words: str
    blames_server: bool = False
    """Whether a fork server or its rendezvous store may hang, so that the fork servers must be replaced."""


@dataclass
class StepPace:
    """The duration of steps under one plan, over all generations, in seconds. `steps`: the durations of the last steps
    after warm-up. `first`: the longest warm-up step. `early`: the number of observed warm-up steps."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    first: float = 0.0
    early: int = 0

    def count(self, number: int, seconds: float) -> None:
        """Records the duration of a step. `number`: its index in its generation, from 0."""
        if number < WARMUP_STEPS:
            self.first, self.early = max(self.first, seconds), self.early + 1
        else:
            self.steps.append(seconds)

    @property
    def is_known(self) -> bool:
        """Returns whether enough steps were observed. Warm-up steps count too, since hangs may end every generation
        during warm-up."""
        return bool(self.steps) or self.early >= WARMUP_STEPS

    @property
    def typical(self) -> float:
        """Returns TIMEOUT_STEPS times the median duration of a step in seconds. If only warm-up steps have been
        observed, the longest of them replaces the median."""
        return TIMEOUT_STEPS * (median(self.steps) if self.steps else self.first)


@dataclass
class _ObservedField:
    """The value of a field in a heartbeat row. `at`: the time from which its silence counts against a limit. `in_line`:
    the rank's run-queue seconds at that time. `since`: the time of the last sign of life, for the report. It is earlier
    than `at` if a rank has waited for a disk."""

    word: int
    at: float
    in_line: float
    since: float = float("nan")

    def __post_init__(self) -> None:
        if math.isnan(self.since):
            self.since = self.at


@dataclass
class HangDetector:
    """Detects hangs of one generation. `holdings` has the heartbeat rows. `patience`: the minimum limit of silence
    during training in seconds; 0 disables the detector."""

    holdings: SharedFileStore
    patience: float
    clock: Callable[[], float] = time.monotonic
    signs: Callable[[int], ProcStats] = read_proc_stats
    """Returns the statistics of a rank's process. On several machines, the process may be on a node."""
    pace: StepPace = field(default_factory=StepPace)
    blind: Callable[[], bool] = lambda: False
    """Returns whether heartbeats are missing because a node sends nothing. Then no rank is reported, since all other
    ranks wait for the ranks of this node."""
    terms: HangLimits = CPU_LIMITS
    _seen: dict[int, _ObservedField] = field(default_factory=dict)
    _waits: dict[int, _ObservedField] = field(default_factory=dict)
    _first: list[int] = field(default_factory=list)
    _work: dict[int, ProcStats] = field(default_factory=dict)
    _disk: dict[int, tuple[float, float]] = field(default_factory=dict)
    """For each rank outside of training: the bytes that it had moved when its last wait for a disk began, and the time
    when that wait began."""
    _blind_since: float | None = None
    _excused: float = float("-inf")
    """Silence before this time does not count, because connections recover from an outage."""
    _step: int = 0
    _warm: int = 0
    _next: float = float("-inf")
    _all_started: float = 0.0
    """The time when each rank last had a process, or the start of the generation."""

    def __post_init__(self) -> None:
        self._all_started = self.clock()
        self._first = self.holdings.column(HeartbeatField.beat)

    def look(self, living: Mapping[int, int]) -> HangReport | None:
        """Checks all ranks. Returns a report if a rank or a fork server hangs, else None. `living`: the process id of
        each living rank; 0 if it is not forked yet."""
        now = self.clock()
        if now < self._next:
            return None
        self._next = now + max(0.0, self.holdings.world / MAX_RANKS_PER_SECOND - 0.1)
        if (unstarted := self._unstarted(living, now)) is not None or not self.patience:
            return unstarted
        if self.blind() or not all(living.values()):  # silence proves nothing now, so it is counted anew
            for before in (*self._seen.values(), *self._waits.values()):
                before.at = before.since = now
            if self._blind_since is None and self.blind():
                self._blind_since = now
            return None
        if self._blind_since is not None:
            self._excused = max(self._excused, now + (now - self._blind_since))
            self._blind_since = None
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
                silent[rank] = now - max(seen.at, self._excused)
        shortest = min(self._limits)
        if max(silent.values(), default=0.0) <= shortest or all(
            seen.word == self._first[rank] for rank, seen in self._seen.items()
        ):
            return None  # no rank has sent a heartbeat in this generation, so ranks may run code that sends none
        _, *running = self._limits
        shortest = min(running)
        delayed = {
            rank: seconds
            for rank, seconds in silent.items()
            if (seconds > shortest or signs(living[rank]).state == "T") and seconds > self._limit(rank, living[rank])
        }
        delayed = {
            rank: own
            for rank in delayed
            if (own := delayed[rank] - (self.signs(living[rank]).in_line - self._seen[rank].in_line))
            > self._limit(rank, living[rank])
        }
        real = {rank: now - self._seen[rank].since for rank in silent}
        found = self._judge(delayed, real, living) if delayed else None
        # Ranks that do not find each other may wait for the rendezvous store, which is a child of a fork server.
        joins = found is not None and set(self.holdings.column(HeartbeatField.phase)) == {RankPhase.join}
        return replace(found, blames_server=joins) if found is not None else None

    def _unstarted(self, living: Mapping[int, int], now: float) -> HangReport | None:
        """Returns a report if a fork server has not started a rank for FORK_SERVER_SECONDS."""
        missing = next((rank for rank, process in living.items() if not process), None)
        if missing is None:
            self._all_started = now
        waited = now - self._all_started
        if waited <= FORK_SERVER_SECONDS:
            return None
        words = Message(
            "hung: the process that starts ranks has not started rank {rank} for {silent:seconds}",
            rank=missing,
            silent=waited,
        )
        return HangReport(-1, waited, words, blames_server=True)

    def _excuse(self, living: Mapping[int, int], now: float) -> None:
        """Resets the silence of all ranks outside of training if one of them is at work ([Note: at work]). A wait for a
        disk is no sign of life: it only defers the limit."""
        extra: dict[int, ProcStats] = {}
        at_work = progresses = False
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
            extra[rank], before = signs, self._work.setdefault(rank, signs)
            moved, since = self._disk.get(rank, (signs.moved, now))
            if signs.state != "D" or signs.moved - moved > BUSY_IO_BYTES:
                moved, since = signs.moved, now
            self._disk[rank] = moved, since
            waits_for_disk = signs.state == "D" and now - since < DISK_TIMEOUT_SECONDS
            computes = (
                pulse.read(HeartbeatField.phase) in INDEPENDENT_PHASES
                and signs.computed - before.computed > BUSY_CPU_SECONDS
            )
            if pulse.read(HeartbeatField.waits) % WAIT_INCREMENT == 0:
                progresses |= computes or signs.moved - before.moved > BUSY_IO_BYTES
                at_work |= progresses or waits_for_disk
        for rank, signs in extra.items() if at_work else ():
            seen = self._seen[rank]
            self._seen[rank] = _ObservedField(seen.word, now, signs.in_line, now if progresses else seen.since)
            self._work[rank] = signs

    def _count_steps(self) -> None:
        """Records the newest step in the heartbeat rows and its duration. Several steps may pass between two checks."""
        step, took = max(
            zip(self.holdings.column(HeartbeatField.step), self.holdings.column(HeartbeatField.took), strict=True)
        )
        if step > self._step and took:
            self._warm += step - self._step if self._step else 1
            self.pace.count(self._warm - 1, 1e-6 * took)
            self._step = step

    @property
    def _limits(self) -> tuple[float, float, float]:
        """Returns the limits of silence in seconds: for a process that a signal has stopped, for a rank that trains,
        and for any other rank."""
        typical, other = self.pace.typical, max(self.terms.otherwise, 10 * self.patience)
        warm = TIMEOUT_STEPS * self.pace.first if self._warm < WARMUP_STEPS else 0.0
        trains = max(self.patience, self.terms.patience, warm) if self.pace.is_known else other
        return max(STOPPED_PROCESS_SECONDS, typical), max(trains, typical), max(other, typical)

    def _limit(self, rank: int, process: int) -> float:
        stopped, trains, other = self._limits
        return stopped if self.signs(process).state == "T" else trains if self._trains(rank) else other

    def _judge(
        self, overdue: Mapping[int, float], silent: Mapping[int, float], living: Mapping[int, int]
    ) -> HangReport | None:
        if not self.terms.tell and not any(self.signs(living[rank]).state == "T" for rank in overdue):
            return self._behind(overdue.keys(), silent, living)
        waits = {rank: self.holdings.pulse(rank).read(HeartbeatField.waits) % WAIT_INCREMENT - 1 for rank in living}
        guilty = [
            rank
            for rank in overdue
            if waits[rank] < 0 or self.signs(living[rank]).state == "T" or self._makes_no_progress(rank, living[rank])
        ]
        if guilty:
            rank = min(guilty, key=lambda rank: (self._place(rank), -overdue[rank]))
            if any(
                self._place(other) < self._place(rank) and not self._trains(other)
                for other in living.keys() - overdue.keys()
            ):
                return None  # `rank` may wait for `other` without publishing it, and `other` is within its limit
            return HangReport(
                rank,
                silent[rank],
                Message(self._hang_msgid(rank, living[rank]), silent=silent[rank]),
            )
        for start in overdue:
            path = [start]
            while (following := waits.get(path[-1], -1)) >= 0 and following not in path:
                path.append(following)
            circle = path[path.index(following) :] if following in path else []
            if circle and all(rank in overdue for rank in circle):
                words: str = f"rank {circle[0]}"
                for rank in (*circle[1:], circle[0]):
                    words = Message("{ranks} waits for rank {rank}", ranks=words, rank=rank)
                return HangReport(
                    circle[0],
                    silent[circle[0]],
                    Message("hung: {words}: they are not in the same collective", words=words),
                )
        return None

    def _behind(self, overdue: Set[int], silent: Mapping[int, float], living: Mapping[int, int]) -> HangReport | None:
        """Returns a report on the rank that is furthest behind, on devices where ranks cannot publish for whom they
        wait. Returns None while any rank makes progress."""
        if overdue < living.keys():
            return None
        first, *others = sorted(living, key=self._place)
        if not others or self._place(first) < self._place(others[0]):
            return HangReport(
                first,
                silent[first],
                Message(self._hang_msgid(first, living[first]), silent=silent[first]),
            )
        shortest = min(silent.values())
        return HangReport(
            -1,
            shortest,
            Message(
                "hung: no sign of life for {shortest}, and no rank is behind the others",
                shortest=show_seconds(shortest),
            ),
        )

    def _makes_no_progress(self, rank: int, process: int) -> bool:
        """Returns whether more than half of the limit of `rank` has passed since it last checked for the data that it
        awaits. Time in the run queue does not count."""
        seen = self._waits[rank]
        return self.clock() - max(seen.at, self._excused) - (
            self.signs(process).in_line - seen.in_line
        ) > 0.5 * self._limit(rank, process)

    def _trains(self, rank: int) -> bool:
        return RankPhase.data <= self.holdings.pulse(rank).read(HeartbeatField.phase) <= self.terms.last

    def _place(self, rank: int) -> tuple[int, int]:
        pulse = self.holdings.pulse(rank)
        return pulse.read(HeartbeatField.step), pulse.read(HeartbeatField.phase)

    def _hang_msgid(self, rank: int, process: int) -> str:
        if self.signs(process).state == "T":
            return mark_msgid("hung: stopped by a signal, no sign of life for {silent:seconds}")
        phase = RankPhase(self.holdings.pulse(rank).read(HeartbeatField.phase))
        return PHASE_TEXTS.get(phase, mark_msgid("hung: no sign of life for {silent:seconds}"))
