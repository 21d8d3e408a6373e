"""The times of a recovery in the event log: no second of a fault counts twice, and none of the interrupted step is
lost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.elastic.event_log import EventLog, record_event
from meshwright.report.faults import compute_goodput, read_events
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent, StepRecord


class Timed:
    """A log and its clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        self.log = EventLog(folder, lambda _: None, lambda: self.now)
        self.records: list[StepRecord] = []

    def step(self, number: int, after: float, seconds: float, between: float = 0.0, late: float = 0.0) -> None:
        """A record that arrives `after` so many seconds, and `late` seconds after the end of its step."""
        self.now += after
        made = {"step": number, "loss": 1.0, "tokens": 8, "gradient_norm": 1.0, "lr": 1.0, "seconds": seconds}
        self.records.append(StepRecord(**made, between_seconds=between, batch=number - 1))
        self.log.hear({"kind": "record", "record": self.records[-1].model_dump(), "late": late}, 0)

    def begin(self, after: float, step: int) -> None:
        self.now += after
        self.log.hear({"kind": "begin", "step": step, "source": "memory"}, 0)

    def fault(self, after: float, detection: float = 0.0) -> None:
        self.now += after
        self.log.fault(cause="hung", rank=1, step=self.log.last + 1, detection=detection, decision="again")

    def recoveries(self) -> list[RunEvent]:
        return [event for event in read_events(self.folder / EVENTS_FILE_NAME) if event.kind == "recovery"]

    def terms(self) -> dict[str, Any]:
        last = {record.step: record for record in self.records}
        found = compute_goodput(tuple(last.values()), 0.0, read_events(self.folder / EVENTS_FILE_NAME))
        assert found is not None
        return found.model_dump()


@pytest.fixture
def timed(tmp_path: Path) -> Timed:
    timed = Timed(tmp_path)
    timed.begin(0.0, 0)
    timed.step(1, 1.0, 1.0)
    return timed


def test_the_interrupted_step_is_lost_and_its_silence_is_detection(timed: Timed) -> None:
    timed.fault(2.5, detection=2.0)
    timed.begin(3.0, 1)
    timed.step(2, 1.0, 1.0)
    (event,) = timed.recoveries()
    assert event.seconds == 4.0 and event.parts["unfinished"] == 0.5
    terms = timed.terms()
    assert (terms["useful"], terms["detection"], terms["recovery"]) == (2.0, 2.0, 3.5)
    assert sum(value for name, value in terms.items() if name != "share") == timed.now - 100.0


def test_a_fault_while_the_run_recovers_counts_its_detection_once(timed: Timed) -> None:
    timed.fault(0.5)
    timed.fault(6.0, detection=5.0)
    timed.begin(3.0, 1)
    timed.step(2, 1.0, 1.0)
    (event,) = timed.recoveries()
    assert event.seconds == 10.0 and event.parts["detection"] == 5.0
    terms = timed.terms()
    assert (terms["detection"], terms["recovery"]) == (5.0, 10.0 - 5.0 - 1.0 + 0.5)
    assert sum(value for name, value in terms.items() if name != "share") == timed.now - 100.0


def test_a_step_that_ended_and_was_reported_after_the_fault_is_no_lost_time(timed: Timed) -> None:
    """Its snapshot was complete, its record was not written: the next ranks report it."""
    timed.fault(1.25)
    timed.begin(3.0, 2)
    timed.step(2, 0.0, 1.0, between=0.125)
    timed.step(3, 1.0, 1.0)
    (event,) = timed.recoveries()
    assert event.step == 2 and event.parts["unfinished"] == 0.125
    terms = timed.terms()
    assert (terms["useful"], terms["between"], terms["recovery"]) == (3.0, 0.125, 3.125)
    assert sum(value for name, value in terms.items() if name != "share") == timed.now - 100.0


def test_the_time_after_the_last_step_counts_once(timed: Timed) -> None:
    """Validation of 2 s precedes the report of the last step, and a save of 1 s follows it."""
    timed.fault(0.5)
    timed.begin(3.0, 1)
    timed.step(2, 3.0, 1.0, late=2.0)
    timed.now += 1.25
    timed.log.hear({"kind": "saved", "step": 2, "waited": 1.0}, 0)
    timed.log.hear({"kind": "ended", "step": 2, "after": 2.25}, 0)
    (event,) = timed.recoveries()
    assert event.seconds == 4.0
    terms = timed.terms()
    assert (terms["between"], terms["saves"], terms["recovery"]) == (2.25, 1.0, 3.5)
    assert sum(value for name, value in terms.items() if name != "share") == timed.now - 100.0


def test_a_save_before_a_fault_is_no_part_of_the_interrupted_step(timed: Timed) -> None:
    timed.now += 2.0
    timed.log.hear({"kind": "saved", "step": 1, "waited": 2.0}, 0)
    timed.fault(0.5)
    timed.begin(3.0, 1)
    timed.step(2, 1.0, 1.0)
    (event,) = timed.recoveries()
    assert event.parts["unfinished"] == 0.5
    terms = timed.terms()
    assert (terms["saves"], terms["recovery"]) == (2.0, 3.5)
    assert sum(value for name, value in terms.items() if name != "share") == timed.now - 100.0


def test_one_event_leaves_neither_a_file_nor_a_thread_open(tmp_path: Path) -> None:
    def opened() -> list[str]:
        return sorted(os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each))

    record_event(tmp_path, print, kind="run_extended", step=1, cause="longer")  # what it imports stays open
    before = [name for name in opened() if str(tmp_path) in name], threading.active_count()
    record_event(tmp_path, print, kind="run_extended", step=2, cause="longer")
    assert [event.step for event in read_events(tmp_path / EVENTS_FILE_NAME)] == [1, 2]
    assert before[0] == [name for name in opened() if str(tmp_path) in name] == []
    deadline = time.monotonic() + 5
    while threading.active_count() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that has nothing to do is about to end
    assert threading.active_count() <= before[1]
