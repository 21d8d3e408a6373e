"""Models months of training on devices that fail. `meshwright simulate` prints the fraction of the wall time that is
progress, and the fractions that are lost.

Failures occur at random, one at a time, with a rate per device. M is the mean time between failures of all devices
together. Training is saved after every interval t. A save stops training for time d, and its checkpoint can be restored
only after a further time w. A failure loses the work after the last checkpoint that can be restored. Recovery takes R =
detect + rebuild + restore, and a failure during recovery restarts the recovery. A spare node replaces a failed node
until the failed node is repaired. While there is no spare node, all devices wait.

    interval       t = sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + d / 18 M) - d           for d < 2 M, else M
    progress       t e^(-w / M) / (M e^(R / M) (e^((t + d) / M) - 1))               of the wall time

The interval is Daly's optimum. The progress is Daly's efficiency times the probability that no failure occurs in the
time w after a save; this formula is exact for the model described above. Source: J. T. Daly, Future Generation Computer
Systems 22, 2006, equations 37 and 20. `expected_fractions` computes all fractions by formula, with unlimited spares.
`simulate_fleet` simulates each failure, with a limited number of spares.

The option `--failures` gives the failure rate: a name of the catalog, failures per device hour (`2e-5`), or the mean
time between failures of one device (`5 y`).

>>> round(optimal_save_interval(60.0, mean_time_between_failures(1.973e-5, 16384)))
1116
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from random import Random
from typing import NamedTuple

from pydantic import Field

from meshwright.catalog import read as catalog
from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.core.quantities import Seconds, parse_quantity

SECONDS_PER_HOUR = 3600.0


class RecoveryPolicy(StrictModel):
    """The parameters of saves and recovery. The defaults describe asynchronous saves, and a recovery of ten minutes."""

    save: Seconds = Field(default=1.0, description="seconds that a save blocks training")
    durable: Seconds = Field(
        default=60.0,
        description="seconds from the end of the blocking part of a save until the checkpoint can be restored",
    )
    interval: Seconds | None = Field(
        default=None, description="seconds of training between saves; null: Daly's optimum"
    )
    detect: Seconds = Field(default=60.0, description="seconds until a failure is detected")
    rebuild: Seconds = Field(
        default=420.0, description="seconds until processes, process groups and devices are ready again"
    )
    restore: Seconds = Field(default=120.0, description="seconds until the state is loaded")

    @property
    def recovery(self) -> float:
        """Returns the seconds from a failure until training resumes, if no other failure occurs."""
        return self.detect + self.rebuild + self.restore


class FleetSpec(StrictModel):
    """The devices of a training run, and their failures. `spares` is the number of spare nodes; None means that there
    is always a spare."""

    devices: int = Field(ge=1)
    devices_per_node: int = Field(default=8, ge=1)
    failures_per_device_hour: float = Field(gt=0, allow_inf_nan=False)
    spares: int | None = Field(default=None, ge=0)
    repair: Seconds = Field(
        default=24 * SECONDS_PER_HOUR, description="seconds until a failed node is a spare node again"
    )

    @property
    def mean_between_failures(self) -> float:
        """Returns the mean seconds between failures of the whole fleet."""
        return mean_time_between_failures(self.failures_per_device_hour, self.devices)


class WallTimeFractions(NamedTuple):
    """Fractions of the wall time by use, whose sum is 1. `rework` is lost work that is repeated, `waiting` the wait for
    a spare node."""

    progress: float
    save: float
    rework: float
    detect: float
    rebuild: float
    restore: float
    waiting: float


@dataclass(frozen=True)
class FleetOutcome:
    """The result for a fleet, as means over `runs` simulations of `seconds` each.

    `interval` is the seconds of training between saves. `failures` is the mean number of failures of a simulation.
    `shares` is the mean fractions, `deviation` the standard deviation of the progress fraction. `expected` is the
    fractions by formula.
    """

    fleet: FleetSpec
    policy: RecoveryPolicy
    seconds: float
    interval: float
    runs: int
    failures: float
    shares: WallTimeFractions
    deviation: float
    expected: WallTimeFractions


def mean_time_between_failures(failures_per_device_hour: float, devices: int) -> float:
    """Returns the mean seconds between failures of all devices together."""
    return SECONDS_PER_HOUR / (failures_per_device_hour * devices)


def optimal_save_interval(save: float, mean: float) -> float:
    """Returns Daly's optimum: the seconds of training between saves of `save` seconds each, if the mean time between
    failures is `mean` seconds."""
    if save >= 2.0 * mean:
        return mean
    ratio = save / (2.0 * mean)
    return math.sqrt(2.0 * save * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save


def save_interval(policy: RecoveryPolicy, mean: float) -> float:
    """Returns the seconds of training between saves: the interval of the policy, or Daly's optimum if the policy has
    none. `mean` is the mean seconds between failures.

    Raises: InputError if the interval is 0, or if a save takes no time and there is no interval.
    """
    if policy.interval is not None:
        if policy.interval == 0.0:
            raise InputError(Message("the interval between saves must be above 0 s; leave it out for Daly's optimum"))
        return policy.interval
    if policy.save == 0.0:
        raise InputError(Message("Daly's optimum is undefined for saves that take 0 s; set --interval"))
    return optimal_save_interval(policy.save, mean)


def expected_fractions(policy: RecoveryPolicy, mean: float, interval: float) -> WallTimeFractions:
    """Returns the fractions of the wall time by formula, with unlimited spares. `mean` is the mean seconds between
    failures, `interval` the seconds of training between saves.

    Raises: InputError if failures are so frequent that no work is ever saved.

    >>> policy = RecoveryPolicy(save=60, durable=0, detect=1800, rebuild=0, restore=0)
    >>> mean = mean_time_between_failures(1.973e-5, 16384)
    >>> round(100 * expected_fractions(policy, mean, optimal_save_interval(60, mean)).progress, 1)
    76.5
    """
    period = (interval + policy.save) / mean
    if period + policy.recovery / mean > 500.0:
        raise InputError(
            Message(
                "a failure occurs every {mean:.3g} s, but a save is complete only every {interval:.3g} s and recovery "
                "takes {recovery:.3g} s: no work is ever saved; save more often (--interval) or lower the failure rate",
                mean=mean,
                interval=interval + policy.save,
                recovery=policy.recovery,
            )
        )
    progress = interval * math.exp(-policy.durable / mean) / math.expm1(period)
    save = mean * (math.exp(-interval / mean) - math.exp(-period)) / -math.expm1(-period)
    cycle = mean * math.exp(policy.recovery / mean)
    ends = [0.0, policy.detect, policy.detect + policy.rebuild, policy.recovery]
    phases = [cycle * (math.exp(-start / mean) - math.exp(-end / mean)) for start, end in pairwise(ends)]
    return WallTimeFractions(*(part / cycle for part in (progress, save, mean - save - progress, *phases, 0.0)))


def spares_needed(fleet: FleetSpec, chance: float = 0.999) -> int:
    """Returns the smallest number of spare nodes that, at any time, suffices with probability `chance`. The number of
    nodes under repair has a Poisson distribution. If its mean is above 745, the normal distribution approximates it,
    with probability 0.999 for any `chance`.

    >>> spares_needed(FleetSpec(devices=16384, failures_per_device_hour=1.973e-5))
    18
    """
    failing = fleet.repair / fleet.mean_between_failures
    term = total = math.exp(-failing)
    count = 0
    if term == 0.0:  # the mean is so large that exp(-mean) is 0; 3.0902 is the 99.9 % quantile of a normal distribution
        return math.ceil(failing + 3.0902 * math.sqrt(failing))
    while total < chance:
        count += 1
        term *= failing / count
        total += term
    return count


def simulate_fleet(
    fleet: FleetSpec, policy: RecoveryPolicy, seconds: float, runs: int = 12, seed: int = 1
) -> FleetOutcome:
    """Simulates the fleet `runs` times. Each simulation covers `seconds` of wall time. Calls with the same arguments,
    including `seed`, give the same result. Raises InputError in the cases of `save_interval` and
    `expected_fractions`."""
    mean = fleet.mean_between_failures
    interval = save_interval(policy, mean)
    formula = expected_fractions(policy, mean, interval)
    plays = [_FleetSimulation(fleet, policy, interval, seconds, Random(f"{seed} {run}")).run() for run in range(runs)]
    shares = [WallTimeFractions(*(part / seconds for part in play.seconds)) for play in plays]
    average = WallTimeFractions(*(sum(parts) / runs for parts in zip(*shares, strict=True)))
    spread = math.sqrt(sum((each.progress - average.progress) ** 2 for each in shares) / max(runs - 1, 1))
    return FleetOutcome(
        fleet, policy, seconds, interval, runs, sum(play.failures for play in plays) / runs, average, spread, formula
    )


class _FleetSimulation:
    """One simulation of a fleet. `seconds` is the wall time by use, in the order of the fields of
    `WallTimeFractions`."""

    def __init__(
        self, fleet: FleetSpec, policy: RecoveryPolicy, interval: float, seconds: float, random: Random
    ) -> None:
        self.fleet, self.policy, self.interval, self.end, self.random = fleet, policy, interval, seconds, random
        self.mean = fleet.mean_between_failures
        self.now = 0.0
        self.failures = 0
        self.free = fleet.spares
        self.repairs: list[float] = []
        self.seconds = [0.0] * len(WallTimeFractions._fields)

    def run(self) -> _FleetSimulation:
        while self.now < self.end:
            self._train(self.random.expovariate(1.0 / self.mean))
            while self.now < self.end and not self._recover():
                pass
        return self

    def _spend(self, *parts: tuple[int, float]) -> None:
        for part, seconds in parts:
            self.seconds[part] += seconds
            self.now += seconds

    def _train(self, until_failure: float) -> None:
        """Trains until the next failure, or until the end of the simulation. At a failure, the work after the last
        checkpoint that can be restored counts as rework."""
        interval, save = self.interval, self.policy.save
        ends = self.now + until_failure >= self.end
        run = min(until_failure, self.end - self.now)
        period = interval + save
        saves = int(run // period)
        rest = run - saves * period
        trained = saves * interval + min(rest, interval)
        saved = trained
        if not ends:
            self.failures += 1
            saved = interval * max(int((run - self.policy.durable) // period), 0)
        self._spend((0, saved), (1, run - trained), (2, trained - saved))
        if ends:
            self.now = self.end

    def _recover(self) -> bool:
        """Tries to recover once. Returns whether no failure occurred during the recovery."""
        self._take_spare()
        until_failure = self.random.expovariate(1.0 / self.mean)
        limit = min(until_failure, max(self.end - self.now, 0.0))
        done = until_failure >= self.policy.recovery
        for part, phase in enumerate((self.policy.detect, self.policy.rebuild, self.policy.restore), start=3):
            taken = min(phase, limit)
            self._spend((part, taken))
            limit -= taken
        self.failures += not done and self.now < self.end
        return done

    def _take_spare(self) -> None:
        """Takes a spare node. If there is none, all devices wait until a node is repaired."""
        if self.free is None:
            return
        heappush(self.repairs, self.now + self.fleet.repair)
        while self.repairs and self.repairs[0] <= self.now:
            heappop(self.repairs)
            self.free += 1
        if self.free:
            self.free -= 1
        else:
            back = heappop(self.repairs)
            self._spend((6, max(min(back, self.end) - self.now, 0.0)))


class FleetTableCell(NamedTuple):
    """One cell of the fleet table (docs/en/simulate.md): the description of a policy, the number of devices, and the
    result."""

    policy: str
    devices: int
    outcome: FleetOutcome


TABLE_POLICIES = (
    (
        Message("save 60 s, recovery 30 min"),
        RecoveryPolicy(save=60.0, durable=0.0, detect=1800.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("save 60 s, recovery 10 min"),
        RecoveryPolicy(save=60.0, durable=0.0, detect=600.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("save 1 s, durable 60 s later, recovery 10 min"),
        RecoveryPolicy(save=1.0, durable=60.0, detect=600.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("save 1 s, durable 60 s later, recovery 3 min"),
        RecoveryPolicy(save=1.0, durable=60.0, detect=180.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("copy to a peer 0.04 s, recovery 60 s"),
        RecoveryPolicy(save=0.04, durable=0.0, detect=60.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("copy to a peer 0.04 s, recovery 10 s"),
        RecoveryPolicy(save=0.04, durable=0.0, detect=10.0, rebuild=0.0, restore=0.0),
    ),
    (
        Message("copy to a peer 0.04 s, recovery 1 s"),
        RecoveryPolicy(save=0.04, durable=0.0, detect=1.0, rebuild=0.0, restore=0.0),
    ),
)
TABLE_DEVICES = (16_384, 32_768, 65_536, 100_000)
TABLE_DAYS, TABLE_RUNS = 54, 12


def fleet_table(
    failures_per_device_hour: float, days: float = TABLE_DAYS, runs: int = TABLE_RUNS
) -> Iterator[FleetTableCell]:
    """Yields one result for each policy in TABLE_POLICIES and each number of devices in TABLE_DEVICES."""
    for name, policy in TABLE_POLICIES:
        for devices in TABLE_DEVICES:
            fleet = FleetSpec(devices=devices, failures_per_device_hour=failures_per_device_hour)
            yield FleetTableCell(name, devices, simulate_fleet(fleet, policy, days * 24 * SECONDS_PER_HOUR, runs))


DEFAULT_FAILURE_SOURCE = "llama3"
DAYS_PER_YEAR = 365.25


class FailureRate(NamedTuple):
    """The number of failures per device hour, and the source of this number as text."""

    per_device_hour: float
    words: str


def parse_failure_rate(text: str) -> FailureRate:
    """Parses the value of `--failures`.

    Raises: InputError if `text` is neither a name of the catalog nor a rate or time above 0.

    >>> parse_failure_rate("2e-5").per_device_hour, round(parse_failure_rate("5 y").per_device_hour, 9)
    (2e-05, 2.2815e-05)
    """
    rows = catalog.failures()
    row = catalog.find_entry(rows, text)
    if row is not None:
        return FailureRate(row["per_device_hour"], f"{row['name']}: {row['source']}")
    ways = Message(
        "one of {rows}, failures per device hour such as 2e-5, or the mean time between failures of a device such as "
        "'5 y'",
        rows=", ".join(rows),
    )
    try:
        rate = float(text)
    except ValueError:
        years = re.fullmatch(r"\s*([0-9.eE+-]+)\s*y\s*", text)
        try:
            seconds = float(years[1]) * DAYS_PER_YEAR * 24 * SECONDS_PER_HOUR if years else parse_quantity(text, "s")
        except ValueError:
            raise InputError(
                Message("failures {text!r} is not {ways}{hint}", text=text, ways=ways, hint=did_you_mean(text, rows))
            ) from None
        rate = SECONDS_PER_HOUR / seconds if seconds > 0 else math.inf
    if not 0 < rate < math.inf:
        raise InputError(Message("failures {text!r}: must be above 0; write {ways}", text=text, ways=ways))
    return FailureRate(rate, Message("as given"))
