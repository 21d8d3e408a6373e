"""Who holds the others up: verdicts from made-up phases of steps, and the shares that follow."""

from __future__ import annotations

import math
import random
import re

import pytest

from meshwright.spec.grid import micro_batches_by_speed
from meshwright.spec.plan import parse_plan
from meshwright.train.straggler import (
    CONFIRMATION_STEPS,
    EXCLUSION_DELAY_STEPS,
    MEDIAN_WINDOW_STEPS,
    WARMUP_STEPS,
    PhaseSeconds,
    SlowPhase,
    Straggler,
    StragglerMonitor,
)


def steps(
    watch: StragglerMonitor,
    count: int,
    seed: int,
    slow: dict[int, float] | None = None,
    late: dict[int, float] | None = None,
    link: float = 1.0,
) -> list[list[Straggler]]:
    """Verdicts of `count` steps: each micro-batch takes 10 ms but for noise of 5 % and a spike now and then; nobody
    ends before the slowest."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        busy = [
            number * 0.01 * (slow or {}).get(rank, 1.0) * draw.gauss(1.0, 0.05) * (2.0 if draw.random() < 0.03 else 1.0)
            for rank, number in enumerate(watch.counts)
        ]
        data = [0.0002 * draw.random() + (late or {}).get(rank, 0.0) for rank in range(len(busy))]
        end = max(a + b for a, b in zip(busy, data, strict=True)) + 0.02 * link
        verdict = watch.hear(
            PhaseSeconds(tuple(busy), tuple(data), tuple(end - a - b for a, b in zip(busy, data, strict=True)))
        )
        if verdict is not None:
            found.append(verdict)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_ten_healthy_runs_raise_no_alarm(seed: int) -> None:
    assert steps(StragglerMonitor(parse_plan("dp4.z1"), 32), 200, seed) == []


def wandering(plan: str, seed: int) -> int:
    """Alarms of 200 steps in which each rank's seconds wander between one and three times what they should be, for some
    steps at a time."""
    watch, draw, alarms = StragglerMonitor(parse_plan(plan), 32), random.Random(seed), 0
    wander = [0.0] * 4
    for _ in range(200):
        wander = [0.8 * each + 0.6 * draw.gauss(0.0, 0.35) for each in wander]
        busy = [count * 0.01 * math.exp(abs(each)) for count, each in zip(watch.counts, wander, strict=True)]
        end = max(busy) + 0.02 * math.exp(abs(draw.gauss(0.0, 0.35)))
        alarms += bool(watch.hear(PhaseSeconds(tuple(busy), (0.0,) * 4, tuple(end - each for each in busy))))
    return alarms


@pytest.mark.parametrize(
    "plan", [*(pytest.param(each, marks=pytest.mark.soak) for each in ("dp4.z1", "dp4.z3")), "dp2.pp2.z1", "pp4"]
)
def test_other_programs_on_the_cores_cause_one_alarm_in_4000_steps_at_most(
    plan: str,
) -> None:
    assert sum(wandering(plan, seed) for seed in range(20)) <= 1


@pytest.mark.parametrize("times", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rank_is_named_within_twenty_steps_and_so_is_its_recovery(times: float, seed: int) -> None:
    watch = StragglerMonitor(parse_plan("dp4.z1"), 32)
    assert steps(watch, 30, seed) == []
    (found,) = steps(watch, 20, seed, slow={2: times})
    assert [(slow.rank, slow.phase) for slow in found] == [(2, SlowPhase.computing)]
    assert steps(watch, 20, seed) == [[]]


def unlike(times: float = 1.0) -> PhaseSeconds:
    """Two fast ranks with six sequences each and two slow ones with two, rank 0 so many times slower."""
    busy = (0.30 * times, 0.30, 0.28, 0.28)
    return PhaseSeconds(busy, (0.0,) * 4, tuple(max(busy) - each + 0.02 for each in busy))


def test_unlike_devices_are_not_slow_and_one_that_becomes_slow_is() -> None:
    watch = StragglerMonitor(parse_plan("dp4.z1.mb2.ga3-3-1-1"), 16)
    assert watch.counts == [6, 6, 2, 2]
    assert [watch.hear(unlike()) for _ in range(40)] == [None] * 40
    (found,) = (verdict for _ in range(20) if (verdict := watch.hear(unlike(2.0))) is not None)
    assert [(slow.rank, slow.phase, slow.words) for slow in found] == [
        (0, SlowPhase.computing, "rank 0 computes 2.0 times as long as before")
    ]
    plan, times = watch.better() or (watch.plan, 1.0)
    assert plan.shares[0] < plan.shares[1] and times > 1.1
    assert list(filter(lambda verdict: verdict is not None, (watch.hear(unlike()) for _ in range(20)))) == [[]]


def test_slow_data_and_a_slow_link_are_told_from_a_slow_rank() -> None:
    watch = StragglerMonitor(parse_plan("dp4.z1"), 32)
    steps(watch, 30, 0)
    (found,) = steps(watch, 20, 0, late={1: 0.1})
    assert [(slow.rank, slow.phase) for slow in found] == [(1, SlowPhase.data)]
    steps(watch, 20, 0)
    (found,) = steps(watch, 20, 0, link=6.0)
    assert [(slow.rank, slow.phase) for slow in found] == [(-1, SlowPhase.communication)]
    assert "a link is slow" in found[0].words


def test_when_a_link_is_slow_hosts_are_asked_which_one_and_only_then() -> None:
    said: list[str] = []
    asked = lambda: [((0, 2), "the link between the hosts of ranks 0 and 2 carries 1.00 MB/s")]
    watch = StragglerMonitor(parse_plan("dp4.z1"), 32, said.append, links=asked)
    for link in (0.02, 0.2, 0.02):
        for step in range(WARMUP_STEPS + MEDIAN_WINDOW_STEPS + 2 * CONFIRMATION_STEPS):
            watch.heed(PhaseSeconds((0.08,) * 4, (0.0,) * 4, (link,) * 4), step, balance=False)
    assert [line.split(": ", 1)[1] for line in said] == [
        "every rank waits 10.0 times as long for the others as before: a link is slow",
        "the link between the hosts of ranks 0 and 2 carries 1.00 MB/s",
        "no rank delays the others any more",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_is_reported_within_twenty_steps_though_its_waits_differ(seed: int) -> None:
    """As one of 100 Mbit/s that carries a tenth: steps of 0.07 s take 0.3 to 0.7 s."""
    watch, draw = StragglerMonitor(parse_plan("dp4.z1"), 32), random.Random(seed)

    def hear(low: float, high: float) -> list[Straggler] | None:
        wait = draw.uniform(low, high)
        return watch.hear(PhaseSeconds((0.03,) * 4, (0.0,) * 4, (wait,) * 4))

    for _ in range(3):
        assert [hear(0.03, 0.05) for _ in range(40)][20:] == [None] * 20
        told = [step for step in range(20) if hear(0.28, 0.68)]
        assert len(told) == 1 and watch.slow == {(-1, SlowPhase.communication)}


def test_where_all_compute_longer_too_no_link_is_slow() -> None:
    watch = StragglerMonitor(parse_plan("dp4.z1"), 32)
    for times in (1.0, 3.0):
        verdicts = [watch.hear(PhaseSeconds((0.08 * times,) * 4, (0.0,) * 4, (0.03 * times,) * 4)) for _ in range(40)]
        assert verdicts == [None] * 40


def test_shares_follow_the_speeds_and_go_back_when_the_rank_recovers() -> None:
    watch = StragglerMonitor(parse_plan("dp4.z1"), 32)
    steps(watch, 20, 0, slow={3: 2.0})
    plan, times = watch.better() or (watch.plan, 1.0)
    assert micro_batches_by_speed([1.0, 1.0, 1.0, 0.5], 32) == (10, 9, 9, 4)
    assert sum(plan.shares) == 32 and plan.shares[3] in (4, 5) and min(plan.shares[:3]) >= 8
    assert 1.3 < times < 1.8
    watch.follow(plan)
    assert steps(watch, 30, 0, slow={3: 2.0}) == []
    assert watch.better() is None
    assert steps(watch, 30, 1) == [[]]
    plan, _ = watch.better() or (watch.plan, 1.0)
    assert plan.shares == ()


def test_balance_states_its_action_and_ranks_in_lockstep_keep_their_micro_batches() -> None:
    said: list[str] = []
    for name, adjusted in (("dp4.z1", True), ("dp4.z3", False)):
        watch = StragglerMonitor(parse_plan(name), 32, said.append)
        busy = PhaseSeconds((0.1, 0.1, 0.1, 0.25), (0.0,) * 4, (0.16, 0.16, 0.16, 0.01))
        plans = [
            plan
            for step in range(WARMUP_STEPS + MEDIAN_WINDOW_STEPS + CONFIRMATION_STEPS)
            if (plan := watch.heed(busy, step, balance=True)) is not None
        ]
        assert bool(plans) is adjusted
    assert (
        said[0]
        == f"step {WARMUP_STEPS + MEDIAN_WINDOW_STEPS + CONFIRMATION_STEPS - 2}: rank 3 computes 2.5 times as long "
        "as its peers"
    )
    assert said[1].startswith(
        f"step {WARMUP_STEPS + MEDIAN_WINDOW_STEPS + CONFIRMATION_STEPS - 2}: the run changes to dp4.z1.mb1.ga"
    )
    assert len(said) == 3


def test_stages_are_compared_with_their_own_kind() -> None:
    watch = StragglerMonitor(parse_plan("dp2.pp2.z1"), 16)
    stages = PhaseSeconds((0.1, 0.1, 0.2, 0.2), (0.0,) * 4, (0.1, 0.1, 0.0, 0.0))
    assert [watch.hear(stages) for _ in range(30)] == [None] * 30


def test_the_gain_of_rebalancing_is_reported_and_a_rank_that_slows_further_gets_less() -> None:
    said: list[str] = []
    watch, step, plans = StragglerMonitor(parse_plan("dp4.z1"), 32, said.append), 0, []
    for slow in (1.0, 2.0, 6.0, 1.0):
        for _ in range(40):
            step += 1
            busy = tuple(0.01 * count * (slow if rank == 3 else 1.0) for rank, count in enumerate(watch.counts))
            end = max(busy) + 0.01
            plan = watch.heed(PhaseSeconds(busy, (0.0,) * 4, tuple(end - each for each in busy)), step, balance=True)
            plans += [plan.shares] if plan is not None else []
    assert plans[0][3] == 4 and plans[1][3] < plans[0][3] and plans[-1] == ()
    pattern = r"steps are ([0-9.]+) times as fast as before \(predicted: ([0-9.]+) times\)"
    gains = [re.search(pattern, line) for line in said]
    measured = [(float(match[1]), float(match[2])) for match in gains if match]
    assert len(measured) == len(plans) and all(
        found == pytest.approx(promised, rel=0.05) for found, promised in measured
    )


def test_a_recovered_rank_gets_its_micro_batches_back() -> None:
    watch, plans = StragglerMonitor(parse_plan("dp4.z1.mb1"), 32), []
    for step in range(110):
        slow = 1.5 if 20 <= step < 60 else 1.0
        busy = tuple((0.02 + 0.01 * count) * (slow if rank == 3 else 1.0) for rank, count in enumerate(watch.counts))
        plan = watch.heed(
            PhaseSeconds(busy, (0.0,) * 4, tuple(max(busy) + 0.01 - each for each in busy)), step, balance=True
        )
        plans += [plan.name] if plan is not None else []
    assert plans == ["dp4.z1.mb1.ga9-9-9-5", "dp4.z1.mb1"]


@pytest.mark.parametrize(("times", "name"), [(1.5, "dp4.z1.mb3-3-3-2.ga6-6-6-5"), (4.0, "dp4.z1.mb4.ga5-5-5-1")])
def test_micro_batches_are_halved_for_a_straggler_and_restored_afterwards(times: float, name: str) -> None:
    watch, optimum = StragglerMonitor(parse_plan("dp4.z1.mb4"), 64), 64 / (3 + 1 / times)
    plans, ends = [], []
    for step in range(90):
        slow = times if 20 <= step < 60 else 1.0
        busy = tuple(0.01 * count * (slow if rank == 3 else 1.0) for rank, count in enumerate(watch.counts))
        plan = watch.heed(
            PhaseSeconds(busy, (0.0,) * 4, tuple(max(busy) + 0.001 - each for each in busy)), step, balance=True
        )
        plans += [plan.name] if plan is not None else []
        ends.append(max(busy))
    assert plans == [name, "dp4.z1.mb4"]
    assert 0.01 * optimum / ends[59] > 0.95
    coarse = StragglerMonitor(parse_plan("dp4.z1.mb4"), 64, halves=False)
    steps(coarse, 20, 0, slow={3: times})
    changed = coarse.better()
    assert changed is not None and changed[0].micro_batch_sizes == () and changed[0].micro_batch == 4


def asked(name: str, slow: float) -> list[dict[str, object]]:
    """What is told of 100 steps in which rank 3 computes so many times as long from step 30 on, and all wait for it."""
    told: list[dict[str, object]] = []
    plan = parse_plan(name)
    watch = StragglerMonitor(plan, 32, tell=lambda kind, **entries: told.append({"kind": kind, **entries}))
    for step in range(100):
        each = 0.1 / watch.counts[0]
        busy = tuple(
            each * count * (slow if rank == 3 and step >= 30 else 1.0) for rank, count in enumerate(watch.counts)
        )
        watch.heed(PhaseSeconds(busy, (0.0,) * 4, tuple(max(busy) + 0.02 - each for each in busy)), step, balance=True)
    return told


@pytest.mark.parametrize("name", ["dp4.z2", "dp4.z3", "tp4", "pp4", "dp2.tp2.z2", "dp2.pp2.z2"])
def test_a_rank_that_no_shares_help_is_told_of_once_it_was_slow_for_long(name: str) -> None:
    verdict, *told = asked(name, 2.0)
    assert (verdict["kind"], verdict["ranks"], verdict["words"][:36]) == (
        "verdict",
        (3,),
        "rank 3 computes 2.0 times as long as",
    )
    assert 30 < verdict["step"] <= 50  # type: ignore[operator]
    assert {message["kind"] for message in told} == {"slow"} and all(message["ranks"] == (3,) for message in told)
    first = told[0]
    assert (
        30 + EXCLUSION_DELAY_STEPS
        < first["step"]
        < 30 + MEDIAN_WINDOW_STEPS + CONFIRMATION_STEPS + EXCLUSION_DELAY_STEPS + 2 * MEDIAN_WINDOW_STEPS
    )  # type: ignore[operator]
    assert (first["plan"], first["times"], first["seconds"], first["without"]) == (
        name,
        *map(pytest.approx, (2.0, 0.22, 0.12)),
    )
    assert asked(name, 1.2) == []


def test_where_shares_make_up_for_a_slow_rank_nobody_asks_to_leave_it_out() -> None:
    assert [message["kind"] for message in asked("dp4.z1", 1.5)] == ["verdict", "rebalanced", "rebalance_result"]
