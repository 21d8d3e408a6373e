"""Which devices take part: who is left out, when that is worth it, and when one comes back. No process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.core.errors import NothingFits
from meshwright.elastic.devices import (
    GAIN_STEPS,
    READMISSION_PROBES,
    WARMUP_STEPS,
    DeviceExclusion,
    ExclusionPolicy,
)
from meshwright.elastic.event_log import EventLog
from meshwright.report.faults import read_events
from meshwright.report.run_text import list_decisions
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent


def even(name: str, world: int) -> tuple[float, float]:
    return 1.0 / parse_plan(name).world, 1.0 / world


class Case:
    """Slots of four devices, a clock, and steps of `seconds` each."""

    def __init__(self, folder: Path, **leaving: Any) -> None:
        self.now, self.step, self.notes, self.folder = 0.0, 0, list[str](), folder
        self.journal = EventLog(folder, self.notes.append)
        self.slots = DeviceExclusion(
            4, self.journal, ExclusionPolicy(**{"predict": even, "probe": "a:b"} | leaving), lambda: self.now
        )
        self.begin("dp4.z2", 10.0)

    def begin(self, plan: str, seconds: float, count: int = 1) -> None:
        self.slots.started(plan)
        self.now += seconds
        self.steps(count, 1.0)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now, self.step = self.now + seconds, self.step + 1
            self.journal.last = self.step
            self.slots.hear({"kind": "record", "record": {"step": self.step, "seconds": seconds}}, range(4), 0)

    def slow(
        self,
        ranks: tuple[int, ...],
        seconds: float,
        without: float,
        last: int = 1000,
        slots: tuple[int, ...] = (0, 1, 2, 3),
    ) -> None:
        message = {
            "kind": "slow",
            "step": self.step,
            "plan": f"dp{len(slots)}.z2",
            "ranks": ranks,
            "times": 2.0,
            "seconds": seconds,
        }
        assert self.slots.hear({**message, "without": without, "last": last}, slots, 0)

    def events(self) -> tuple[RunEvent, ...]:
        return read_events(self.folder / EVENTS_FILE_NAME)


def test_a_slow_device_is_left_out_where_the_others_are_predicted_to_be_faster(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.slow((2,), 2.0, 1.0)
    assert case.slots.of(4) == (
        0,
        1,
        2,
        3,
    )  # where the ranks sit that are about to end: asked whenever one of them says something
    assert (case.slots.take(), case.slots.seat(3)) == (3, (0, 1, 3))
    (event,) = case.events()
    assert (event.ranks, event.slots, event.predicted) == ((2,), (2,), pytest.approx(1.5))
    case.begin("dp3.z2", 1.0)
    case.steps(WARMUP_STEPS + GAIN_STEPS, 1.25)
    assert case.events()[-1].kind == "rebalance_result" and case.events()[-1].measured == pytest.approx(1.6)
    assert "1.60 times as fast as before (predicted: 1.50 times)" in case.notes[-1]
    assert [row.measured for row in list_decisions(case.events())] == [pytest.approx(1.6)]


def test_a_straggler_stays_where_excluding_it_saves_less_than_it_costs(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    for _ in range(3):
        case.slow((2,), 1.4, 1.0)
    case.slow((2,), 2.0, 1.0, last=case.step + 20)
    assert case.slots.take() is None and case.slots.of(4) == (0, 1, 2, 3)
    assert [event.decision for event in case.events()] == ["stays: a step would take 0.95 times as long"]
    case.slots.started("dp4.z2")
    case.steps(1, 10.0)
    case.slow((2,), 2.0, 1.0, last=case.step + 20)
    assert case.events()[-1].decision == "stays: the remaining 20 steps do not make up for a restart"


def test_a_device_stays_where_the_others_have_no_plan(tmp_path: Path) -> None:
    def nothing(name: str, world: int) -> tuple[float, float]:
        raise NothingFits("no plan runs on 3 or fewer ranks: the run cannot go on with them")

    case = Case(tmp_path, predict=nothing)
    case.slow((0,), 5.0, 1.0)
    assert case.slots.take() is None and "no plan runs on 3" in case.events()[0].decision


def test_two_stragglers_are_excluded_together_and_a_free_device_replaces_one(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.slow((0, 3), 4.0, 1.0)
    assert (case.slots.take(), case.slots.of(2)) == (2, (1, 2))
    other = Case(tmp_path)
    other.slow((3,), 4.0, 1.0)
    assert other.slots.take() == 3 and other.slots.of(2) == (0, 1)  # the best plan of three takes two
    other.begin("dp2.z2", 1.0)
    other.slow((1,), 4.0, 1.0, slots=(0, 1))
    assert (other.slots.take(), other.slots.of(2)) == (2, (0, 2))


def test_a_device_comes_back_when_its_products_are_fast_again_and_not_before(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.slow((1,), 2.0, 1.0)
    case.slots.take()
    case.begin("dp3.z2", 1.0, WARMUP_STEPS + GAIN_STEPS - 1)
    case.now += 31.0
    assert case.slots.due() is None  # what leaving it out has gained is not known
    case.steps(1, 1.0)
    assert case.slots.due() == 1 and case.slots.due() is None
    case.slots.measured(1, 0.2)
    case.slots.measured(1, 0.19)
    for _ in range(READMISSION_PROBES):
        assert case.slots.take() is None
        case.slots.measured(1, 0.11)
    assert (case.slots.take(), case.slots.of(4)) == (4, (0, 1, 2, 3))
    assert case.events()[-1].kind == "device_readmitted" and case.events()[-1].predicted == pytest.approx(4 / 3)


def test_one_measurement_is_under_way_at_a_time(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.slow((1,), 2.0, 1.0)
    case.slots.take()
    case.begin("dp3.z2", 1.0, WARMUP_STEPS + GAIN_STEPS)
    case.now += 31.0
    assert case.slots.due() == 1
    case.now += 310.0
    assert case.slots.due() is None
    case.slots.probed()
    assert case.slots.due() == 1


def test_a_device_that_no_product_shows_is_tried_again_later_and_later(tmp_path: Path) -> None:
    case = Case(tmp_path, probe="", rest=100.0, starts=0.0)
    waits = []
    for _ in range(3):
        case.slow((1,), 2.0, 1.0)
        assert (case.slots.take(), case.slots.of(3)) == (3, (0, 2, 3))
        began = case.now
        case.begin("dp3.z2", 0.0, WARMUP_STEPS + GAIN_STEPS)
        while (wanted := case.slots.take()) is None:
            case.now += 1.0
            assert case.slots.due() is None
        waits.append(case.now - began)
        assert wanted == 4
        case.begin("dp4.z2", 0.0)
    assert waits == pytest.approx([100.0, 200.0, 400.0], abs=3.0)


def test_a_rank_that_failed_too_often_stays_out_until_all_are_asked_for(tmp_path: Path) -> None:
    case = Case(tmp_path, rest=1.0)
    case.slots.leave_out([3])
    case.now += 1000.0
    assert case.slots.due() is None and case.slots.of(3) == (0, 1, 2)
    assert case.slots.seat(4) == (0, 1, 2, 3) and not case.slots.out


def test_the_gain_of_an_exclusion_is_measured_by_the_steps_after_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.slots.started("dp4.z2")
    case.steps(WARMUP_STEPS + GAIN_STEPS - 2, 2.0)
    case.slow((2,), 2.0, 1.0)
    case.steps(5, 2.0)  # the ranks that are about to end
    assert not any(event.kind == "rebalance_result" for event in case.events())
    assert case.slots.take() == 3
    case.begin("dp3.z2", 1.0, WARMUP_STEPS + GAIN_STEPS)
    assert [event.measured for event in case.events() if event.kind == "rebalance_result"] == [pytest.approx(2.0)]


def test_ranks_move_where_their_node_leaves_and_another_one_has_room() -> None:
    assert not DeviceExclusion.are_to_move((0, 1), None) and not DeviceExclusion.are_to_move((0, 1), (0, 1, 2))
    assert DeviceExclusion.are_to_move((0, 1), (0, 2)) and DeviceExclusion.are_to_move((0, 1), (0, 2, 3))
    assert not DeviceExclusion.are_to_move((0, 1, 2), (0, 1))  # fewer ranks, then
