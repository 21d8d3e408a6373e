"""What the ranks do around a save that they make themselves: on several machines, without copies in memory, at the
end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.checkpoint.save import SINGLE_RANK, RankExchange, SaveFailed
from meshwright.core import storage
from meshwright.core.ipc import Heartbeat, HeartbeatField, open_heartbeats
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.supervisor import Supervisor
from meshwright.spec.record import EVENTS_FILE_NAME, StepRecord
from meshwright.train import checkpoint_pruner, recovery, storage_probe
from meshwright.train.checkpoint_pruner import CheckpointPruner
from meshwright.train.console import RunConsole
from meshwright.train.memory_checkpointer import OFFLOADED_TEXT
from meshwright.train.metrics import StepGap
from meshwright.train.recovery import Recovery
from meshwright.train.storage_probe import SILENT_DISK_TEXT, StorageProbe, is_disk_silent


class Rank:
    """A rank that saves at once, and what it says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[dict[str, Any]] = []
        self.problem: Exception | None = None
        self.steps = 0
        monkeypatch.setattr(recovery, "rank_exchange", lambda mesh: SINGLE_RANK)
        say = lambda kind, **fields: self.said.append({"kind": kind, **fields})
        memory = SimpleNamespace(own="", single_node=False, history=0)
        channel: Any = SimpleNamespace(rank=0, say=say, memory=memory)
        trainer: Any = SimpleNamespace(mesh=None, scale=SimpleNamespace(dynamic=False), save=self.save, steps=0)
        run = SimpleNamespace(folder=str(folder), memory_checkpoints=True, keep=2, retries=2, checkpoint_every=1)
        launch: Any = SimpleNamespace(run=run, workload=SimpleNamespace(skips_spikes=False, steps=100))
        self.trainer, self.pulse = trainer, Heartbeat(open_heartbeats("", 1), 0)
        self.recovery = Recovery(launch, channel, trainer, self.pulse, {})
        self.recovery.gap = StepGap()

    def save(self, folder: Path, extra: Any) -> Path:
        if self.problem is not None:
            raise self.problem
        return folder / f"step-{self.trainer.steps}"

    def step(self) -> list[dict[str, Any]]:
        self.trainer.steps += 1
        self.said.clear()
        self.recovery.save(must=False)
        return self.said


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path, monkeypatch)


def test_the_time_in_which_old_checkpoints_are_removed_belongs_to_the_save(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_pruner, "prune_checkpoints", lambda *_: time.sleep(0.3) or [])
    (said,) = rank.step()
    assert said["kind"] == "saved" and said["seconds"] < 0.1 and 0.3 <= said["waited"] < 0.6
    assert rank.recovery.gap.blocked == said["waited"]
    assert rank.pulse.read(HeartbeatField.saved) < 100_000


def test_a_failed_save_removes_what_interrupted_ones_have_left(rank: Rank, tmp_path: Path) -> None:
    """They may be the reason that there is no room."""
    (tmp_path / "checkpoints" / ".step-00000001.0123abcd.tmp").mkdir(parents=True)
    rank.problem = SaveFailed("no room")
    assert [said["kind"] for said in rank.step()] == ["unsaved"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("why", "kind"), [("no in-memory checkpoints: they would take 2 GiB", "degraded"), (OFFLOADED_TEXT, "note")]
)
def test_that_there_are_no_copies_in_memory_is_said_once_and_is_an_event(
    rank: Rank, tmp_path: Path, why: str, kind: str
) -> None:
    """A plan that offloads to disk is the user's choice. Anything else is less protection than the run should have."""
    rank.recovery.copies = SimpleNamespace(refused=why, waited=0.0, begin=lambda record: None)  # type: ignore[assignment]
    for step in (1, 2):
        rank.recovery.copy(StepRecord(step=step, loss=1.0, tokens=1, gradient_norm=1.0, lr=0.1, seconds=1.0))
    assert rank.said == [{"kind": kind, "line": why}]
    noted, heard = list[str](), list[Any]()
    supervisor: Any = SimpleNamespace(
        _begun=True,
        generation=0,
        _journal=EventLog(tmp_path, noted.append),
        _slots=SimpleNamespace(hear=lambda *_: False),
        _here=lambda: (0,),
        hear=lambda rank, message: RunConsole(words=lambda line: heard.append(line) or line).hear(message),
    )
    Supervisor._hear(supervisor, 0, rank.said[0])
    assert [line.removeprefix("rank 0: ") for line in noted + heard] == [why]
    assert (tmp_path / EVENTS_FILE_NAME).exists() == (kind == "degraded")


def test_after_a_save_that_hung_saves_are_skipped_until_the_disk_answers(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation saved the same step, hung again, and so on until no retry was left."""
    answers, real = threading.Event(), storage.write_file
    hangs = lambda path, blocks: answers.wait(60.0) and real(path, blocks)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(storage_probe.storage, "write_file", hangs)
    monkeypatch.setattr(storage_probe, "PROBE_SECONDS", 0.2)
    seen = list[int]()
    monkeypatch.setattr(
        rank.recovery.trainer, "save", lambda *_: seen.append(rank.pulse.read(HeartbeatField.saving)) or tmp_path
    )
    assert [said["kind"] for said in rank.step()] == ["saved"], "no save was interrupted before"
    assert seen == [1] and rank.pulse.read(HeartbeatField.saving) == 0
    rank.pulse.write(HeartbeatField.saving, 1)  # it was killed
    holdings = SharedFileStore(1)
    holdings.pulse(0).write(HeartbeatField.saving, 1)
    holdings.begin()
    assert holdings.pulse(0).read(HeartbeatField.saving) == 1, "the next generation knows"
    holdings.close()
    rank.recovery.probe = StorageProbe(rank.recovery.folder, rank.pulse)
    assert rank.pulse.read(HeartbeatField.saving) == 0
    for waited in (0.2, 0.0, 0.0):
        (said,) = rank.step()
        assert (said["kind"], said["step"], said["why"]) == ("unsaved", rank.trainer.steps, SILENT_DISK_TEXT)
        assert waited <= said["waited"] < waited + 0.15
    assert seen == [1]
    answers.set()
    rank.recovery.probe.is_silent(must=True)
    assert [said["kind"] for said in rank.step()] == ["saved"] and seen == [1, 1]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_last_save_waits_for_the_disk_and_is_never_skipped(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(storage_probe.storage, "write_file", lambda *_: answers.wait(60.0))
    monkeypatch.setattr(storage_probe, "LAST_SAVE_SECONDS", 0.3)
    rank.pulse.write(HeartbeatField.saving, 1)
    probe, before = StorageProbe(tmp_path, rank.pulse), rank.pulse.read(HeartbeatField.beat)
    assert not is_disk_silent(probe, SINGLE_RANK, must=True)
    assert rank.pulse.read(HeartbeatField.beat) > before + 2, "it is not called hung meanwhile"
    others = RankExchange(0, 2, lambda text: ["False", text])
    assert is_disk_silent(probe, others, must=False) and is_disk_silent(
        StorageProbe(tmp_path, rank.pulse), RankExchange(0, 2, lambda text: [text, "True"]), must=False
    )
    answers.set()


def test_a_removal_that_hangs_delays_training_once_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, said = threading.Event(), list[dict[str, Any]]()
    hangs = lambda folder, keep, verified, say: (answers.wait(60.0) and say("done")) or [folder]
    monkeypatch.setattr(checkpoint_pruner, "prune_checkpoints", hangs)
    monkeypatch.setattr(checkpoint_pruner, "MAX_REMOVAL_WAIT_SECONDS", 0.2)
    pruner, began = (
        CheckpointPruner(tmp_path, lambda kind, **fields: said.append({"kind": kind, **fields})),
        time.time(),
    )
    for _ in range(20):
        assert pruner.prune(2) == []
    assert 0.2 <= time.time() - began < 2.0
    assert said == [
        {
            "kind": "degraded",
            "line": "old checkpoints are not removed: the removal after the last save has not ended",
        }
    ]
    answers.set()
    while pruner.prune(2) == []:
        time.sleep(0.01)
    assert [message["line"] for message in said[1:]] == ["done", "done"]
