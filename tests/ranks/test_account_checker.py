"""Tests that the account checker (sample_accounting.py) rejects wrong accounts: a report whose figures differ from the
raw lines, a step that is counted twice, a wait without an event."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_accounting
from fault_runs import launch
from sample_accounting import check, check_changed, clock, raw

from meshwright.report.faults import FaultRow, fault_rows
from meshwright.report.run import RunFolder, RunSummary, summarize_run
from meshwright.spec.record import RunEvent, StepRecord, digest_batch

ROWS, STEPS = 8, 12
BEGAN = 1_000_000.0
"""Time of day at which the first step begins. Each step takes a second, and a tenth passes before it."""
STARTS = {0, 3, 7}
"""Records of the first step after a start of ranks."""

Line = dict[str, Any]


def records() -> list[Line]:
    made = []
    for at, step in enumerate([*range(1, 8), *range(7, STEPS + 1)]):
        fields = {"loss": 6.0 / step, "tokens": 64, "gradient_norm": 1.0, "lr": 1e-3, "seconds": 1.0}
        samples = digest_batch(step - 1, ROWS).text
        between = 0.0 if at in STARTS else 0.1
        record = StepRecord(step=step, between_seconds=between, batch=step - 1, samples=samples, **fields)
        made.append(record.model_dump(exclude_none=True))
    return made


def events() -> list[Line]:
    """Events of a forged run. Rank 1 hangs half a second after step 3; this is detected after 2 s and recovered in 3 s.
    It is killed in step 8, and step 7 runs again. After step 9 training waits 2 s for a checkpoint. The last checkpoint
    takes 1 s. Copies and validation take 0.3 s after the last step."""
    killed = "killed by SIGKILL: by someone's kill -9"
    made = [
        RunEvent(kind="fault", at=5.7, rank=1, cause="hung: no sign of life", step=4, detection=2.0),
        RunEvent(kind="recovery", at=8.7, step=3, source="memory", seconds=3.0, parts={"unfinished": 0.5}),
        RunEvent(kind="fault", at=12.2, rank=1, cause=killed, step=8, generation=1),
        RunEvent(kind="recovery", at=16.2, step=6, lost=1, source="disk", seconds=4.0, parts={"unfinished": 0.2}),
        RunEvent(kind="save", at=20.0, step=9, seconds=2.0, generation=2),
        RunEvent(kind="save", at=23.9, step=STEPS, seconds=1.0, generation=2),
        RunEvent(kind="ended", at=23.9, step=STEPS, seconds=0.3, generation=2),
    ]
    return [json.loads(event.but(at=BEGAN + event.at).to_line()) for event in made]


def write(folder: Path, lines: list[Line], name: str) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path, text: Path) -> Path:
    """Returns a forged run. conftest.py checks it after each test, so a test restores the lines that it changes."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "launch.json").write_text(launch(text, folder, "dp2.z1", STEPS).to_json())
    write(folder, records(), "records")
    write(folder, events(), "events")
    return folder


def test_true_accounts_pass_and_are_held_against_the_clock(run: Path) -> None:
    terms = check(run)
    assert (terms["detection"], terms["saves"], terms["again"]) == (2.0, 3.0, pytest.approx(1.1))
    assert terms["recovery"] == pytest.approx(3.0 - 1.0 + 0.5 + 4.0 - 2.1 + 0.2)
    compared = clock(run, raw(run / "records.jsonl"), raw(run / "events.jsonl"))
    assert compared == 4, "both recoveries, the time between them, and that until the end"


@pytest.mark.parametrize(
    ("name", "forge", "said"),
    [
        ("records", lambda lines: lines[:5] + lines[4:], "step 5 is counted twice"),
        ("events", lambda lines: [*lines[:4], lines[4] | {"seconds": 0.0}, *lines[5:]], "the clock 7.7"),
        ("events", lambda lines: [*lines[:2], lines[2] | {"detection": 3.0}, *lines[3:]], "the clock 7.5"),
        ("events", lambda lines: [*lines[:3], lines[3] | {"seconds": 9.0}, *lines[4:]], "the clock 4.0"),
        ("records", lambda lines: [*lines[:9], lines[9] | {"seconds": 4.0}, *lines[10:]], "the clock 7.7"),
        ("events", lambda lines: [*lines[:6], lines[6] | {"seconds": 2.0}], "the clock 7.7"),
    ],
    ids=[
        "a step twice",
        "a wait without event",
        "a detection of nothing",
        "a longer recovery",
        "a longer step",
        "a longer end",
    ],
)
def test_forged_lines_are_rejected(
    run: Path, name: str, forge: Callable[[list[Line]], list[Line]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report accepts these lines; the clock does not."""
    monkeypatch.setattr(sample_accounting, "BUSY_SECONDS", sample_accounting.LEAST_SECONDS)
    true = raw(run / f"{name}.jsonl")
    write(run, forge(true), name)
    with pytest.raises(AssertionError, match=said):
        check(run)
    write(run, true, name)


def forged_cause(found: list[FaultRow]) -> list[FaultRow]:
    return [row._replace(cause="killed by SIGSEGV") if row.ranks else row for row in found]


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (forged_cause, "killed by SIGSEGV"),
        (lambda found: found[:1], "are not in the report"),
        (lambda found: [*found, found[-1]], "are in no event"),
    ],
    ids=["another cause", "a fault left out", "a fault told twice"],
)
def test_another_table_of_faults_is_rejected(
    run: Path, monkeypatch: pytest.MonkeyPatch, forge: Callable[[list[FaultRow]], list[FaultRow]], said: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sample_accounting, "fault_rows", lambda *given: forge(fault_rows(*given)))
        with pytest.raises(AssertionError, match=said):
            check(run)


@pytest.mark.parametrize("term", ["saves", "detection", "recovery", "again", "between"])
def test_another_goodput_is_rejected(run: Path, monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    def forged(folder: RunFolder) -> RunSummary:
        found = summarize_run(folder)
        assert found.goodput is not None
        return found.but(goodput=found.goodput.but(**{term: getattr(found.goodput, term) + 0.01}))

    with monkeypatch.context() as patch:
        patch.setattr(sample_accounting, "summarize_run", forged)
        with pytest.raises(AssertionError, match=f"{term} is"):
            check(run)


def test_a_ledger_that_hides_a_wrong_batch_is_rejected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = raw(run / "records.jsonl")
    write(run, [*true[:9], true[9] | {"batch": 7}, *true[10:]], "records")
    check(run)  # the report names the step
    with monkeypatch.context() as patch:
        hide = lambda folder: (found := summarize_run(folder)).but(
            ledger=found.ledger and found.ledger.but(problems=())
        )
        patch.setattr(sample_accounting, "summarize_run", hide)
        with pytest.raises(AssertionError, match="steps read other samples"):
            check(run)
    write(run, true, "records")


def test_every_run_that_has_changed_is_checked_once(run: Path) -> None:
    seen: dict[Path, tuple[int, int]] = {}
    assert check_changed(run.parent, seen) == [run]
    assert check_changed(run.parent, seen) == []
    write(run, [*events(), {"kind": "node_joined", "at": BEGAN + 30.0, "node": "1"}], "events")
    assert check_changed(run.parent, seen) == [run]
    write(run, events(), "events")
