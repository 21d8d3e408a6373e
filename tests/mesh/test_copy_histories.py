"""Copies of one step that different executions made are never read together ([Note: history] in core/snapshots.py)."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.checkpoint.memory_checkpoint import MemorySnapshot, SnapshotLayout
from meshwright.checkpoint.save import SINGLE_RANK
from meshwright.core.snapshots import HISTORIES_PER_GENERATION
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
