"""Waits of the supervisor that would last for ever if nothing limited them, in virtual time (virtual_cluster.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_cluster import Cluster

from meshwright.cli.node_role import NodeRole, _await_nodes
from meshwright.core.errors import Interrupted, MeshwrightError, NothingFits
from meshwright.core.node_wait import JOIN_SECONDS, WAIT_NOTE_SECONDS
from meshwright.elastic.attempt import RankJob

LINES = JOIN_SECONDS // WAIT_NOTE_SECONDS - 1
"""Lines about a wait after its first one."""


class TimedNotes(list[str]):
    """Lines for the user; `at` has the time of each on the clock of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster, self.at = cluster, list[float]()

    def append(self, line: str) -> None:
        super().append(line)
        self.at.append(self.cluster.calendar)

    def times(self, words: str) -> list[float]:
        return [at for at, line in zip(self.at, self, strict=True) if words in line]


def made(folder: Path, nodes: int, **more: Any) -> Cluster:
    cluster = Cluster(folder, nodes, 1, step=2.0, **more)
    cluster.notes = TimedNotes(cluster)
    work = RankJob("module:function", nodes, {}, folder)
    cluster.options = {"replan": lambda world: replace(work, world=world), "rejoin_timeout": 10.0, **cluster.options}
    return cluster


def kinds_of(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_with_too_few_nodes_says_so_every_minute_and_ends_with_everything_saved(tmp_path: Path) -> None:
    cluster = made(tmp_path, 3, kinds=("gone",), options={"min_ranks": 3})
    with pytest.raises(Interrupted, match=r"stopped by too few nodes .room for 2 ranks, run.min_ranks is 3.") as end:
        cluster.train()
    assert end.value.exit_code == 75 and "everything is saved; the same command goes on" in str(end.value)
    cluster.leader.dissolve()
    (fault,) = cluster.told
    assert fault.source == "memory" and fault.lost <= 2 and cluster.disk == cluster.done > fault.step - fault.lost
    notes: Any = cluster.notes
    began, *others = notes.times("the nodes have")
    assert 0.0 < began - fault.at < 20.0 and len(others) == LINES
    times = [began, *others, cluster.calendar]
    assert all(later - earlier <= WAIT_NOTE_SECONDS + 15.0 for earlier, later in pairwise(times))
    (ended,) = notes.times("the run saves everything and ends")
    assert JOIN_SECONDS <= ended - began < JOIN_SECONDS + 1.0
    assert "verdict" in kinds_of(tmp_path) and cluster.calendar - fault.at < JOIN_SECONDS + 60.0


def test_a_run_that_cannot_save_with_too_few_nodes_ends_all_the_same(tmp_path: Path) -> None:
    def refuse(world: int) -> RankJob:
        raise NothingFits(f"no plan for {world}")

    cluster = made(tmp_path, 3, kinds=("gone",), options={"min_ranks": 3, "replan": refuse})
    with pytest.raises(Interrupted, match=r"too few nodes .* goes on from the last checkpoint"):
        cluster.train()
    cluster.leader.dissolve()
    assert cluster.calendar - cluster.told[0].at < JOIN_SECONDS + 60.0


@pytest.mark.parametrize("least", [0, 2])
def test_a_run_with_enough_nodes_waits_only_for_the_rejoin_timeout(tmp_path: Path, least: int) -> None:
    cluster = made(tmp_path, 3, kinds=("gone",), options={"min_ranks": least}).train()
    assert cluster.told[0].healed - cluster.told[0].at < 60.0 and len(cluster.ranks) == 2
    assert len([line for line in cluster.notes if "the nodes have" in line]) == 1


def test_a_node_that_comes_back_late_is_waited_for(tmp_path: Path) -> None:
    cluster = made(tmp_path, 3, kinds=("gone",), options={"min_ranks": 3})
    gone = cluster._happen

    def happen(kind: str, number: int, agent: Any, rank: int) -> None:
        gone(kind, number, agent, rank)
        cluster.at(200.0, lambda: cluster.join(number))

    cluster._happen = happen  # type: ignore[method-assign]
    (fault,) = cluster.train().told
    assert 200.0 < fault.healed - fault.at < 230.0 and fault.source == "memory" and len(cluster.ranks) == 3


@pytest.mark.parametrize("after", [None, 2])
def test_a_leader_that_too_few_nodes_join_ends(tmp_path: Path, after: int | None) -> None:
    """One that follows a lost leader says so every minute, and leaves a run that the same command goes on with."""
    cluster = made(tmp_path, 2)
    cluster.lead()
    place = NodeRole(0, 4, (1,) * 4, "10.0.0.0", 1, after)
    run: Any = SimpleNamespace(rejoin_timeout=10.0, min_ranks=3)
    with pytest.raises(MeshwrightError) as end:
        _await_nodes(cluster.leader, place, cluster.notes.append, run)
    cluster.leader.dissolve()
    assert end.value.exit_code == (1 if after is None else 75) and JOIN_SECONDS <= cluster.now < JOIN_SECONDS + 5.0
    lines = cluster.notes.times("waiting until there is room for 3")  # type: ignore[attr-defined]
    assert len(lines) == (0 if after is None else LINES)
