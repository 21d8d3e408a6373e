"""Waits of the supervisor that would last for ever if nothing limited them, in virtual time (virtual_cluster.py)."""

from __future__ import annotations

import contextlib
import errno
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
from meshwright.elastic.node import NODE_TIMEOUT_SECONDS
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


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.elastic.restart_policy.RETRY_PAUSE_SECONDS", 0.0)


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


@pytest.mark.parametrize(("killing", "limit"), [(45.0, 45.0), (300.0, 60.0)])
def test_a_rank_whose_driver_unpins_memory_has_a_minute_to_end(tmp_path: Path, killing: float, limit: float) -> None:
    """The next ranks start after its end. A rank that does not end in this time holds nobody up for longer."""
    cluster = made(tmp_path, 3, kinds=("dies",), options={"terms": ACCELERATOR_LIMITS})
    cluster.killing = killing
    fault = cluster.train().told[0]
    assert fault.source == "memory" and limit < fault.healed - fault.at < limit + 20.0


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


class FailingCalls:
    """Makes one call of the new leader fail that follows a lost one: the `which`-th of `name`, a call of its files, its
    wait or its fork server's pipe. `made`: the number of such calls until ranks have made two steps."""

    def __init__(self, folder: Path, name: str, which: int) -> None:
        self.name, self.which, self.made, self.failed = name, which, 0, False
        self.cluster = made(folder, 3, kinds=("leader",))
        succeed = self.cluster._succeed

        def replaced(silent: bool) -> Any:
            fleet = succeed(silent)
            pipe = type(fleet).__bases__[1]
            files = [self.cluster.leader_files, self.cluster.hosts[self.cluster.leads].files]
            places: Any = {"wait": [fleet._inbox.poller], "events": [pipe]}.get(name, files)
            for place in places:
                setattr(place, name, self.failing(getattr(place, name)))
            return fleet

        self.cluster._succeed = replaced  # type: ignore[method-assign]

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*words: Any) -> Any:
            if not self.cluster.told[-1].healed or self.cluster.healthy < 2:
                self.made += 1
                if self.made == self.which:
                    self.failed = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*words)

        return instead


CALLS = ("memfd_create", "fstat", "ftruncate", "pwrite", "pread", "close", "wait", "events")


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("name", CALLS)
def test_no_single_error_of_the_system_ends_a_run_that_a_new_leader_takes_over(tmp_path: Path, name: str) -> None:
    """The first ten calls of each kind fail in turn, and three later ones."""
    first = FailingCalls(tmp_path / "none", name, 0)
    first.cluster.train()
    assert first.made, "it is called"
    for which in sorted({*range(1, min(first.made, 10) + 1), *(first.made * part // 4 for part in (1, 2, 3))} - {0}):
        calls = FailingCalls(tmp_path / str(which), name, which)
        (fault,) = calls.cluster.train().told
        assert calls.failed and fault.healed and fault.source == "memory" and fault.lost <= 1, (which, fault)
        assert fault.healed - fault.at < 60.0 and "verdict" not in kinds_of(tmp_path / str(which))


def test_events_that_were_read_before_an_error_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = made(tmp_path, 3)
    fleet = cluster.lead()
    while len(fleet.nodes) < 2:
        fleet.events(0.1)
    ends = [
        {"event": "ended", "rank": rank, "generation": 0, "status": 0, "words": f"{number}"}
        for number, rank in enumerate((1, 1, 2))
    ]
    for rank, event in zip((1, 1, 2), ends, strict=True):
        cluster.hosts[rank].end.send(event)
    fleet.say(event="ended", rank=0, generation=0, status=0, words="3")
    heard, fails = list[str](), [True] * 4

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*words: Any) -> Any:
            if fails.pop() if fails else False:
                raise OSError(errno.EIO, "")
            return call(*words)

        return instead

    for there, name in ((fleet._snapshots.rounds, "look"), (fleet._snapshots.rounds, "take_reports")):
        monkeypatch.setattr(there, name, failing(getattr(there, name)))
    cluster.run(cluster.now + 1.0, lambda: False)
    for _ in range(12):
        with contextlib.suppress(OSError):
            heard += [event["words"] for event in fleet.events(0.1) if event["event"] == "ended"]
    assert sorted(heard) == ["0", "1", "2", "3"] and heard.index("0") < heard.index("1") and not fails
    fleet.dissolve()


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("retries", [0, 2])
def test_an_error_that_does_not_go_away_ends_the_wait_for_nodes_after_the_retries(tmp_path: Path, retries: int) -> None:
    cluster = made(tmp_path, 2)
    fleet, calls = cluster.lead(), list[float]()

    def fail(timeout: float) -> list[Any]:
        calls.append(timeout)
        raise OSError(errno.EIO, "Input/output error")

    fleet._gather = fail  # type: ignore[method-assign,assignment]
    run: Any = SimpleNamespace(rejoin_timeout=10.0, min_ranks=0, retries=retries)
    with pytest.raises(OSError, match="Input/output error"):
        await_nodes(fleet, NodeRole(0, 2, (1, 1), "10.0.0.0", 1), cluster.notes.append, run)
    assert len(calls) == 1 + retries == 1 + len([line for line in cluster.notes if "it tries again" in line])
    fleet.dissolve()


def test_the_silence_of_a_node_counts_as_detection(tmp_path: Path) -> None:
    cluster = made(tmp_path, 3, kinds=("link",), options={"rejoin_timeout": 600.0}).train()
    assert cluster.told[0].healed
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (fault,) = [event for event in events if event["kind"] == "fault"]
    assert NODE_TIMEOUT_SECONDS <= fault["detection"] < NODE_TIMEOUT_SECONDS + 1.0
