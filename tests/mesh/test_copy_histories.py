"""Which in-memory checkpoints are read together ([Note: history] in core/snapshots.py), and who opens them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worlds import raising, run_world

from meshwright.checkpoint import memory_checkpoint
from meshwright.checkpoint.memory_checkpoint import (
    MemoryCheckpoint,
    MemorySnapshot,
    SnapshotLayout,
    plan_snapshot_layout,
)
from meshwright.checkpoint.save import SINGLE_RANK, RankExchange
from meshwright.core.snapshots import HISTORIES_PER_GENERATION, LOST_LOCATION
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import parse_plan
from meshwright.train import memory_checkpointer
from meshwright.train.memory_checkpointer import newest_memory_checkpoint

INDEX = {"plan": "dp2", "digest": "d", "world": 2, "pieces": []}
LAYOUT = SnapshotLayout(json.dumps(INDEX).encode(), [], [], 0)


def copies(path: Path, *versions: tuple[int, int]) -> str:
    """Of one rank: for each version its history and step."""
    path.touch()
    memory = MemorySnapshot(str(path))
    memory.allocate(LAYOUT, 4)
    for history, step in versions:
        memory.write(step, LAYOUT, [], json.dumps({"history": history}).encode(), history=history)
    return str(path)


def test_ranks_go_on_from_the_newest_step_that_one_execution_made_on_all_of_them(tmp_path: Path) -> None:
    later = HISTORIES_PER_GENERATION
    one, other = copies(tmp_path / "0", (0, 4), (0, 5)), copies(tmp_path / "1", (0, 4), (later, 5))
    found = newest_memory_checkpoint([one, other], SINGLE_RANK)
    assert found is not None and found.step == 4
    assert [state["history"] for state in found.states] == [0, 0]
    assert newest_memory_checkpoint([copies(tmp_path / "2", (0, 5)), other], SINGLE_RANK) is None


def test_steps_of_before_a_rollback_are_not_newer_than_those_after_it(tmp_path: Path) -> None:
    found = newest_memory_checkpoint([copies(tmp_path / "0", (0, 9), (1, 5))], SINGLE_RANK)
    assert found is not None and found.step == 5


WORLD = 8


def on_all_ranks(work: Callable[[RankExchange], Any]) -> list[Any]:
    return raising(run_world(WORLD, work))


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """The files of eight ranks, each with its eighth of a vector at step 5."""
    found = []
    for rank in range(WORLD):
        path = tmp_path / str(rank)
        path.touch()
        memory, values = MemorySnapshot(str(path)), torch.arange(4 * rank, 4 * rank + 4, dtype=torch.float32)
        piece = ShardMetadata("w", (4 * WORLD,), "float32", None, (), 4 * rank, 4 * rank + 4)
        layout = plan_snapshot_layout([(piece, values)], {}, parse_plan(f"dp{WORLD}"), rank)
        memory.allocate(layout, 4)
        memory.write(5, layout, [], b"{}", history=0)
        found.append(str(path))
    return found


def shard(found: MemoryCheckpoint, rank: int) -> torch.Tensor:
    return found.read("w", found.manifest.tensors["w"].pieces[rank])


def opens(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, int], bool] = lambda place, time: False) -> list[str]:
    """Returns the list of opened places, which grows. `fails`: whether the given opening of a place fails."""
    opened: list[str] = []
    true = memory_checkpoint.open_snapshot

    def open_snapshot(place: str) -> MemorySnapshot:
        opened.append(place)
        if fails(place, opened.count(place)):
            raise ConnectionResetError("the node is busy")
        return true(place)

    for module in (memory_checkpoint, memory_checkpointer):
        monkeypatch.setattr(module, "open_snapshot", open_snapshot)
    monkeypatch.setattr(memory_checkpoint, "RETRY_PAUSES", (0.0, 0.0))
    return opened


def test_a_rank_opens_its_own_copies_and_those_that_it_needs(
    places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 8 ranks needs its own elements and those of the next rank: 16 openings, not 64."""
    opened = opens(monkeypatch)

    def recover(ranks: RankExchange) -> bool:
        found = newest_memory_checkpoint(places, ranks)
        assert found is not None and found.step == 5
        for _ in range(3):
            for rank in (ranks.rank, (ranks.rank + 1) % WORLD):
                assert shard(found, rank).tolist() == [4.0 * rank + at for at in range(4)]
        return True

    assert all(on_all_ranks(recover)) and {opened.count(place) for place in places} == {2}


def test_few_copies_of_other_ranks_are_open_at_a_time(places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_checkpoint, "MAX_OPEN_SNAPSHOTS", 3)
    found = newest_memory_checkpoint(places, SINGLE_RANK)
    assert found is not None
    assert [shard(found, rank)[0] for rank in range(WORLD)] == [4.0 * rank for rank in range(WORLD)]
    assert len(found._opened) == 3


def test_copies_that_answer_at_the_third_try_are_read(places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, lambda place, time: place == places[6] and time in (1, 2))
    assert all(found is not None for found in on_all_ranks(lambda ranks: newest_memory_checkpoint(places, ranks)))


@pytest.mark.parametrize("lost", [False, True])
def test_copies_that_do_not_answer_are_not_used_and_the_reason_is_said_once(
    places: list[str], monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Of copies that were lost with their node the supervisor has spoken."""
    opens(monkeypatch, lambda place, time: place == places[6])
    heard: list[str] = []
    where = [LOST_LOCATION if lost and at == 6 else place for at, place in enumerate(places)]
    assert set(on_all_ranks(lambda ranks: newest_memory_checkpoint(where, ranks, heard.append))) == {None}
    line = "the in-memory checkpoint of rank 6 cannot be read: the node is busy; goes on from an older checkpoint"
    assert heard == ([] if lost else [line])


def test_copies_of_eight_ranks_are_read_by_one(places: list[str]) -> None:
    found = newest_memory_checkpoint(places, SINGLE_RANK)
    assert found is not None and shard(found, 7).tolist() == [28.0, 29.0, 30.0, 31.0]


def test_copies_of_three_ranks_are_read_by_eight(tmp_path: Path) -> None:
    few = [copies(tmp_path / str(rank), (0, 5)) for rank in range(3)]
    found = on_all_ranks(lambda ranks: newest_memory_checkpoint(few, ranks))
    assert all(each is not None and len(each.states) == 3 for each in found)
