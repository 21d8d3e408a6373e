"""Waits of the supervisor that would last for ever if nothing limited them, in virtual time (virtual_cluster.py)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_cluster import Cluster

from meshwright.cli.leader_role import await_nodes
from meshwright.cli.node_role import NodeRole
from meshwright.core.errors import Interrupted, MeshwrightError, NothingFits
from meshwright.core.node_wait import JOIN_SECONDS, WAIT_NOTE_SECONDS
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.hang_detector import ACCELERATOR_LIMITS, FORK_SERVER_SECONDS
from meshwright.elastic.local_agent import SEND_SECONDS, LocalAgent
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.supervisor import Supervisor

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
    run: Any = SimpleNamespace(rejoin_timeout=10.0, min_ranks=3, retries=5)
    with pytest.raises(MeshwrightError) as end:
        await_nodes(cluster.leader, place, cluster.notes.append, run)
    cluster.leader.dissolve()
    assert end.value.exit_code == (1 if after is None else 75) and JOIN_SECONDS <= cluster.now < JOIN_SECONDS + 5.0
    lines = cluster.notes.times("waiting until there is room for 3")  # type: ignore[attr-defined]
    assert len(lines) == (0 if after is None else LINES)


def happens_too(cluster: Cluster, more: Callable[[Any], None]) -> None:
    """Calls `more` with the agent of the rank that a fault hits."""
    before = cluster._happen

    def happen(kind: str, number: int, agent: Any, rank: int) -> None:
        before(kind, number, agent, rank)
        more(agent)

    cluster._happen = happen  # type: ignore[method-assign]


@pytest.mark.parametrize("leads", [False, True])
def test_a_fork_server_that_starts_no_ranks_any_more_is_replaced(tmp_path: Path, leads: bool) -> None:
    """On a node, and on the machine that leads. There its rank does not end, and the next one does not get ready."""
    cluster = made(tmp_path, 3, kinds=("dies",))

    def hang(agent: Any) -> None:
        (cluster.leader if leads else agent).hangs, cluster.hung_opens = True, int(leads)

    happens_too(cluster, hang)
    (fault,) = cluster.train().told
    assert fault.source == "memory" and fault.lost == 0
    assert FORK_SERVER_SECONDS < fault.healed - fault.at < FORK_SERVER_SECONDS + 30.0
    assert any("has not started rank" in line for line in cluster.notes) != leads
    assert any("was not ready within 5 min 0 s: it starts again" in line for line in cluster.notes) == leads
    assert kinds_of(tmp_path).count("fault") == 2


def test_a_store_that_hangs_is_replaced_with_its_fork_server(tmp_path: Path) -> None:
    cluster = made(tmp_path, 3, kinds=("dies",))
    happens_too(cluster, lambda _: setattr(cluster.leader, "store_hangs", True))
    (fault,) = cluster.train().told
    assert fault.source == "memory" and fault.lost == 0
    assert ACCELERATOR_LIMITS.otherwise < fault.healed - fault.at < ACCELERATOR_LIMITS.otherwise + 30.0
    assert kinds_of(tmp_path).count("fault") == 2


@pytest.mark.parametrize("hung", [1, 9])
def test_the_fork_server_of_a_leader_that_hangs_while_it_loads_is_replaced(tmp_path: Path, hung: int) -> None:
    cluster = made(tmp_path, 1, hung_opens=hung)
    cluster.lead()
    run: Any = SimpleNamespace(rejoin_timeout=10.0, min_ranks=0, retries=2)
    place = NodeRole(0, 1, (1,), "10.0.0.0", 1)
    with pytest.raises(MeshwrightError, match="was not ready within") if hung > 2 else nullcontext():
        await_nodes(cluster.leader, place, cluster.notes.append, run)
    assert FORK_SERVER_SECONDS * min(hung, 3) < cluster.now < FORK_SERVER_SECONDS * min(hung, 3) + 5.0
    cluster.leader.dissolve()


HANGS_ONCE = """
import json, os, signal, sys
from pathlib import Path
say = lambda **event: print(json.dumps(event), flush=True)
mark = Path(sys.argv[2])
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
say(event="ready", pid=os.getpid(), port=1, secret="ab")
for line in sys.stdin:
    told = json.loads(line)
    if told["do"] == "start":
        same = {"rank": told["rank"], "generation": told["generation"]}
        say(event="started", pid=os.getpid(), **same)
        say(event="ended", status=0, **same)
"""


@pytest.mark.parametrize("retries", [0, 3])
def test_a_fork_server_that_is_stopped_while_it_loads_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    (tmp_path / "hangs_once.py").write_text(HANGS_ONCE)
    monkeypatch.setattr("meshwright.elastic.local_agent.FORK_SERVER_MODULE", "hangs_once")
    monkeypatch.setattr("meshwright.elastic.supervisor.FORK_SERVER_SECONDS", 3.0)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    work = RankJob("module:function", 2, {}, tmp_path / "run", (str(tmp_path / "mark"),), {"PYTHONPATH": paths})
    notes = list[str]()
    run = Supervisor(work, lambda *_: None, notes.append, care=FaultPolicy(retries=retries))
    with pytest.raises(RankFailed, match=r"was not ready within 3.00 s") if not retries else nullcontext():
        run.run()
    assert notes == (["the process that starts ranks was not ready within 3.00 s: it starts again"] if retries else [])


ECHOES = """
import os, sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_a_fork_server_that_does_not_read_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of ten times the size of the pipe wait for it, in order."""
    (tmp_path / "echoes.py").write_text(ECHOES)
    monkeypatch.setattr("meshwright.elastic.local_agent.FORK_SERVER_MODULE", "echoes")
    agent = LocalAgent(tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    os.kill(agent.pid, signal.SIGSTOP)
    began = time.monotonic()
    for number in range(640):
        agent.command("event", number, event="echo", payload="x" * 1000)
    assert time.monotonic() - began < SEND_SECONDS + 10.0
    os.kill(agent.pid, signal.SIGCONT)
    heard = list[int]()
    while len(heard) < 640 and not agent.ended and time.monotonic() < began + 60.0:
        heard += [event["rank"] for event in agent.events(0.1)]
    agent.close()
    assert heard == list(range(640))
