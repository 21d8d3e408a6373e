"""Runs on storage that fails: what it costs, what is said, and that the accounts of the report are those of the raw
files afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fault_runs import STEPS, events, launch, losses, state, train
from sample_accounting import check

from meshwright.checkpoint.retention import list_checkpoints
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.core.errors import MeshwrightError
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.hang_detector import CPU_LIMITS
from meshwright.elastic.local_agent import LocalAgent
from meshwright.train.console import SILENT_KINDS

PLAN = "dp2.z1"
SOON = replace(CPU_LIMITS, otherwise=3.0)
"""Seconds without progress after which the process that writes a checkpoint is ended."""


@pytest.fixture(scope="module")
def whole(agent: LocalAgent, tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, bytes]:
    """The end of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(agent, launch(text, folder, PLAN), [])
    return state(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in list_checkpoints(folder / "checkpoints"))


@pytest.mark.soak
def test_a_misbehaving_checkpoint_writer_costs_at_most_that_checkpoint(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """An exception of any kind ended the run; so did an old checkpoint that cannot be removed; one that is stopped held
    the run for ever."""
    folder, notes, kinds = tmp_path / "run", list[str](), set[str]()
    hows = {2: "raise", 4: "not empty", 6: "strange", 8: "stopped", 12: "raise"}
    work = launch(text, folder, PLAN, checkpoint_every=2, keep=1, hang_timeout=0)
    hear = lambda rank, message: kinds.add(message["kind"])
    train(agent, work, [], notes, hear=hear, terms=SOON, disk={str(step): how for step, how in hows.items()})
    unsaved = [event for event in events(folder) if event.kind == "unsaved"]
    assert [event.step for event in unsaved] == [2, 8, 12]
    assert [event.cause.partition(" for ")[0] for event in unsaved] == [
        "ValueError: nobody expected this", "the process that writes it made no progress",
        "ValueError: nobody expected this",
    ]  # fmt: skip
    said = "\n".join(notes)
    assert all(f"no checkpoint at step {step}: " in said for step in (2, 8, 12)) and "gossip" in kinds - set(
        SILENT_KINDS
    )
    assert f"step-{STEPS:08d}" in names(folder) and all(
        verify_checkpoint(path) == [] for path in list_checkpoints(folder / "checkpoints")
    )
    assert sorted(losses(folder)) == list(range(STEPS + 1)) and state(folder) == whole != {}
    check(folder)


def test_a_run_that_was_killed_before_its_first_durable_checkpoint_begins_again(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """It had reported more steps than lie between two checkpoints, and was refused."""
    folder, notes = tmp_path / "run", list[str]()
    work = launch(text, folder, PLAN, checkpoint_every=4, retries=0)
    killed = {"rank": 1, "step": 7, "phase": "backward", "how": "SIGKILL"}
    with pytest.raises(RankFailed):
        train(agent, work, [killed], disk={"4": "raise"})
    assert names(folder) == [] and max(losses(folder)) == 6
    train(agent, work, [], notes, hear=lambda rank, message: notes.append(message.get("line", "")))
    assert "the run begins at step 0 again: its earlier 6 steps were not saved" in notes
    assert state(folder) == whole != {}
    assert check(folder)["again"] > 0.0


def test_a_disk_without_room_for_the_last_checkpoint_gets_it_when_older_ones_went(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    folder, notes = tmp_path / "run", list[str]()
    work = launch(text, folder, PLAN, checkpoint_every=4)
    train(agent, work, [], notes, hear=lambda rank, message: notes.append(message.get("line", "")), crowded=1)
    assert names(folder) == ["step-00000012", "step-00000016"] and state(folder) == whole != {}
    said = "\n".join(notes)
    assert "no space left" in said and "to make room for the last checkpoint" in said
    assert [event.step for event in events(folder) if event.kind == "unsaved"] == [STEPS]
    assert check(folder)["saves"] > 0.0


@pytest.mark.soak
def test_a_disk_that_stays_full_at_the_end_is_one_line_and_the_same_command_goes_on(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """It ended in "exit status 1 and no message"."""
    folder = tmp_path / "run"
    work = launch(text, folder, PLAN, checkpoint_every=4, retries=2)
    with pytest.raises(MeshwrightError, match=r"no space left: the checkpoint needs .* make room") as caught:
        train(agent, work, [], crowded=0)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert names(folder) == ["step-00000012"], "the last valid one stays, whatever else goes"
    assert [event.kind for event in events(folder)].count("unsaved") >= 2, (
        "tried again; of the last try the error tells"
    )
    train(agent, work, [])
    assert state(folder) == whole != {}
    check(folder)


def test_the_accounts_are_those_of_the_raw_files_after_faults_of_every_kind(
    agent: LocalAgent, tmp_path: Path, text: Path, whole: dict[str, bytes]
) -> None:
    """A rank killed, one that raises, one killed while the run recovers, a save that fails, one that is killed."""
    folder = tmp_path / "run"
    faults = [
        {"rank": 1, "step": 5, "phase": "backward", "how": "SIGKILL"},
        {"rank": 0, "step": 9, "phase": "update", "how": "raise"},
        {"rank": 1, "step": 0, "phase": "build", "how": "SIGKILL", "times": 3},
    ]
    work = launch(text, folder, PLAN, checkpoint_every=3)
    train(agent, work, faults, disk={"3": "broken", "6": "killed"})
    terms = check(folder)
    assert terms["recovery"] > 0.0 and state(folder) == whole != {}
    lines = (folder / "records.jsonl").read_text().splitlines()
    (folder / "records.jsonl").write_text("\n".join([*lines[:8], lines[8][:40], *lines[10:], ""]))
    check(folder)
