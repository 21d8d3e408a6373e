"""What nodes retain when their leader is lost, and what the next leader makes of it: real files of copies, in one
process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from snapshot_files import snapshot_file

from meshwright.core.ipc import message_line, wait_readable
from meshwright.core.secure_channel import SecureChannel
from meshwright.core.snapshots import HISTORIES_PER_GENERATION
from meshwright.core.version import __version__
from meshwright.elastic.leader_snapshots import LeaderSnapshots
from meshwright.elastic.local_agent import SystemInterface
from meshwright.elastic.node import LEADER_LOST_EXIT, NodeAgent
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_inventory import (
    MAX_SETS,
    MAX_VERSIONS,
    MAX_WORLD,
    RETAINED_SECONDS,
    AdoptionPolicy,
    RetainedSnapshots,
    newest_complete_version,
    read_inventory,
)

INDEX = json.dumps({"plan": "dp2", "digest": "d", "world": 2, "pieces": []}).encode()
POLICY = AdoptionPolicy(60.0, "job")
G = HISTORIES_PER_GENERATION


def write(file: int, *versions: tuple[int, int], byte: bytes = b"a") -> None:
    """Copies of a rank: for each version its history and step."""
    with snapshot_file(file, INDEX, 64, 4) as (head, view):
        for history, step in versions:
            slot, state = head.take(), b"{}"
            begin = head.begin(slot)
            view[begin : begin + 64] = byte * 64
            head.name(slot, step, 0, len(state), history)
            at, _ = head.place_of_state(step)
            view[at : at + len(state)] = state
            head.name(slot, step, xxhash.xxh3_64_intdigest(byte * 64 + state), len(state), history)


def store(world: int, **ranks: list[tuple[int, int]]) -> SharedFileStore:
    """Of the ranks r0, r1, ..."""
    made = SharedFileStore(world)
    for rank, versions in ranks.items():
        write(made.file(int(rank[1:])), *versions)
    return made


def sent(retained: RetainedSnapshots) -> Any:
    """An inventory as it arrives."""
    return json.loads(message_line(retained.inventory()))


def test_a_node_reports_complete_copies_alone() -> None:
    stored = store(3, r0=[(0, 4), (G, 5)], r1=[])
    stored.file(2)  # nobody has written to it
    found, why = read_inventory(sent(RetainedSnapshots({"ab": stored}, "job", 0.0)), "job")
    assert found is not None and why == ""
    assert found["ab"].world == 3 and found["ab"].ranks == {0: [(0, 4), (G, 5)]}
    stored.close()


def inventory(key: str, world: int, **ranks: list[tuple[int, int]]) -> Any:
    listed = [[int(rank[1:]), versions] for rank, versions in ranks.items()]
    message = {"version": __version__, "job": "job", "sets": [{"key": key, "world": world, "ranks": listed}]}
    found, why = read_inventory(json.loads(json.dumps(message)), "job")
    assert found is not None, why
    return found


def test_copies_of_one_step_that_two_executions_made_are_never_combined() -> None:
    """Ranks may have run the step again after a fault, or on other batches after they went back."""
    first = inventory("k", 2, r0=[(0, 4), (0, 5)])
    assert newest_complete_version({"a": first, "b": inventory("k", 2, r1=[(G, 5)])}) is None
    found = newest_complete_version({"a": first, "b": inventory("k", 2, r1=[(G, 5), (0, 4)])})
    assert found is not None and found.version == (0, 4) and found.generation == 0
    rolled = newest_complete_version({"a": inventory("k", 1, r0=[(G, 9), (G + 1, 5)])})
    assert rolled is not None and rolled.version == (G + 1, 5), "steps of before a rollback are of the past"


def test_copies_of_two_plans_are_never_combined_and_the_newer_plan_is_read() -> None:
    old = inventory("old", 2, r0=[(0, 7)], r1=[(0, 7)])
    assert (
        newest_complete_version({"a": inventory("new", 2, r0=[(G, 8)]), "b": inventory("old", 2, r1=[(G, 8)])}) is None
    )
    half = newest_complete_version({"a": old, "b": inventory("new", 2, r0=[(G, 8)])})
    assert half is not None and (half.key, half.version) == ("old", (0, 7)), "the new plan is not complete yet"
    whole = newest_complete_version({"a": old, "b": inventory("new", 1, r0=[(G, 8)])})
    assert whole is not None and (whole.key, whole.version) == ("new", (G, 8))
    assert newest_complete_version({"a": old, "b": inventory("old", 3, r2=[(0, 7)])}) is None, "nodes disagree"


GOOD = {"version": __version__, "job": "job", "sets": [{"key": "ab", "world": 2, "ranks": [[0, [[0, 5]]]]}]}


def with_set(**fields: Any) -> Any:
    return {**GOOD, "sets": [{**GOOD["sets"][0], **fields}]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**GOOD, "job": "other"}, "belong to another job or run"),
        ({**GOOD, "version": "0.0.1"}, "are of version 0.0.1"),
        ({**GOOD, "version": {"a": "\x9b"}}, "are of version"),
        ("text", "cannot be read"),
        ([], "cannot be read"),
        (5, "cannot be read"),
        ({**GOOD, "sets": 5}, "cannot be read"),
        ({**GOOD, "sets": [[]]}, "cannot be read"),
        (with_set(key="../../etc"), "cannot be read"),
        (with_set(key="a" * 65), "cannot be read"),
        (with_set(world=MAX_WORLD + 1), "cannot be read"),
        (with_set(world=True), "cannot be read"),
        (with_set(world=0), "cannot be read"),
        (with_set(ranks=[[2, [[0, 5]]]]), "cannot be read"),
        (with_set(ranks=[[-1, [[0, 5]]]]), "cannot be read"),
        (with_set(ranks=[[0, [[0, 2.5]]]]), "cannot be read"),
        (with_set(ranks=[[0, [[0, 2**70]]]]), "cannot be read"),
        (with_set(ranks=[[0, 5]]), "cannot be read"),
        (with_set(ranks={"0": [[0, 5]]}), "cannot be read"),
    ],
)
def test_an_inventory_of_another_run_or_of_anything_else_is_passed_over_with_a_line(message: Any, words: str) -> None:
    found, why = read_inventory(message, "job")
    assert found is None and words in str(why)


def test_an_inventory_is_limited_in_size() -> None:
    long = with_set(ranks=[[0, [[0, step] for step in range(1, 1000)]]])
    found, _ = read_inventory({**long, "sets": [{**long["sets"][0], "key": f"k{n}"} for n in range(50)]}, "job")
    assert found is not None and len(found) == MAX_SETS and len(found["k0"].ranks[0]) == MAX_VERSIONS


class Lender:
    address = "10.0.0.1:7"

    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


OUTSIDE = SystemInterface()._replace(
    lender=Lender,  # type: ignore[arg-type]
    mirror=lambda *_: SimpleNamespace(ranks=set(), close=lambda: None),  # type: ignore[arg-type,return-value]
)


def leader() -> tuple[LeaderSnapshots, SnapshotLocations]:
    locations = SnapshotLocations()
    locations.alive.add("10.0.0.2:7")
    return LeaderSnapshots(OUTSIDE, "10.0.0.1", "secret", locations, lambda _: None, lambda *_, **__: None), locations


def test_the_next_leader_reads_its_own_copies_here_and_others_at_their_nodes() -> None:
    snapshots, locations = leader()
    own, stale = store(3, r1=[(G, 6)], r0=[(G, 6)]), store(2, r0=[(0, 9)])
    retained = RetainedSnapshots({"ab": own, "old": stale}, "job", 0.0)
    there = store(3, r2=[(G, 6), (G, 7)], r1=[(G, 6)])
    inventories = {"10.0.0.2:7": sent(RetainedSnapshots({"ab": there}, "job", 0.0))}
    adopted, reasons = snapshots.adopt(POLICY._replace(retained=retained), inventories)
    assert adopted is not None and not reasons
    assert (adopted.generation, adopted.same, adopted.holdings, own.key) == (1, False, own, "ab")
    assert not stale.is_open and own.is_open
    runs = locations.start(["10.0.0.1:7"] * 2, "new", "ab")
    assert runs == [("10.0.0.1:7", 2), ("10.0.0.2:7", 1)]
    locations.alive.discard("10.0.0.1:7")
    assert locations._found("ab") == ["", "10.0.0.2:7", "10.0.0.2:7"], "a mirror of one that is lost afterwards"
    own.close()
    there.close()


def test_copies_that_are_not_those_of_all_ranks_are_a_line() -> None:
    snapshots, _ = leader()
    own = store(2, r0=[(0, 6)])
    retained = RetainedSnapshots({"ab": own}, "job", 0.0)
    adopted, reasons = snapshots.adopt(POLICY._replace(retained=retained), {"10.0.0.2:7": {"version": "0"}})
    assert adopted is None and [str(why).partition(" ")[0] for why in reasons] == ["are", "are"]
    assert str(reasons[1]) == "are incomplete: those of some ranks are missing" and not own.is_open


@pytest.mark.parametrize(
    ("adopts", "job", "said"), [(True, "other", "another job or run"), (False, "job", "run.restart")]
)
def test_a_leader_that_may_not_adopt_closes_what_it_had(adopts: bool, job: str, said: str) -> None:
    snapshots, _ = leader()
    own = store(1, r0=[(0, 6)])
    policy = POLICY._replace(adopts=adopts, retained=RetainedSnapshots({"ab": own}, job, 0.0))
    adopted, [why] = snapshots.adopt(policy, {})
    assert adopted is None and not own.is_open and snapshots.shared == {} and said in str(why)


def test_a_run_without_copies_in_memory_adopts_none() -> None:
    snapshots, _ = leader()
    assert snapshots.adopt(None, {"10.0.0.2:7": GOOD}) == (None, [])


class Here(NodeAgent):
    outside = OUTSIDE

    def _local_agent(self, warm: Any = None) -> Any:
        self.ended: list[str] = []
        self.idle, ours = os.pipe()
        os.close(ours)
        parts = {"ended": False, "handle": self.idle, "events": lambda _: [], "command": lambda *_, **__: None}
        return SimpleNamespace(
            **parts, clear=lambda: not self.ended.append("ranks"), close=lambda: self.ended.append("process")
        )


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., tuple[Here, SecureChannel]]]:
    """Makes a node and the end of its leader."""
    ends: list[Any] = []

    def make(retained: RetainedSnapshots | None = None) -> tuple[Here, SecureChannel]:
        with socket.create_server(("127.0.0.1", 0)) as door:
            theirs = socket.create_connection(door.getsockname())
            leads = SecureChannel(door.accept()[0], {})
        theirs.setblocking(False)
        node = Here(SecureChannel(theirs, {"logs": str(tmp_path), "warm": []}), "127.0.0.1", "secret", 1, {})
        if retained is not None:
            node.retained = retained
            node.begin()
        ends.extend((leads, node.link, SimpleNamespace(close=lambda: os.close(node.idle))))
        return node, leads

    yield make
    for end in ends:
        end.close()


def turn(node: Here, done: Callable[[], bool]) -> None:
    """Until what was sent has come."""
    end = time.monotonic() + 60.0
    while not done() and time.monotonic() < end:
        assert node.turn() is None
    assert done()


def start(leads: SecureChannel, key: str, source: str, job: str = "job") -> None:
    leads.send({"do": "sources", "key": key, "source": source, "runs": [["10.0.0.1:7", 1]], "job": job})
    what = {"target": "m:f", "payload": {}, "world": 2, "generation": 0, "every": 0.1, "store": ["h", 1, "p"]}
    leads.send({"do": "start", **what, "key": key, "ranks": [[0, 0, "log"]], "here": 1})


def test_a_node_whose_leader_is_lost_ends_its_ranks_and_retains_its_copies(made: Any) -> None:
    node, leads = made()
    start(leads, "ab", "ab")
    turn(node, lambda: "ab" in node.holdings)
    write(node.holdings["ab"].file(0), (0, 3))
    leads.close()
    assert node.run() == LEADER_LOST_EXIT
    retained = node.retained
    assert node.ended == ["ranks"] and retained is not None and retained.job == "job"

    second, leads = made(retained)
    assert wait_readable(60.0, leads.handle)
    lends = leads.read()[0][0]
    found, _ = read_inventory(lends["copies"], "job")
    assert found is not None and found["ab"].ranks == {0: [(0, 3)]}
    file = second._file("ab", 0)
    assert file is not None, "it lends what it has retained"
    os.close(file)
    start(leads, "new", "ab")
    turn(second, lambda: sorted(second.holdings) == ["ab", "new"])
    start(leads, "new", "new")
    turn(second, lambda: sorted(second.holdings) == ["new"])
    leads.send({"do": "end", "code": 0, "line": ""})
    second.run()
    assert second.retained is None and not second.holdings


def test_what_a_node_retains_is_closed_in_time_when_no_leader_reads_it(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(Here, "outside", OUTSIDE._replace(clock=lambda: now[0]))
    stored = store(1, r0=[(0, 3)])
    node, _ = made(RetainedSnapshots({"ab": stored}, "job", now[0] + RETAINED_SECONDS))
    assert node.turn() is None and stored.is_open
    now[0] += RETAINED_SECONDS + 1.0
    node._heard = now[0]
    assert node.turn() is None and not stored.is_open and not node.holdings
    node.end((1, ""))
    late = store(1, r0=[(0, 3)])
    node, _ = made(RetainedSnapshots({"ab": late}, "job", now[0] - 1.0))
    assert not late.is_open and not node.holdings, "nothing is offered to a leader that would be gone when it reads it"
    node.end((1, ""))


def test_a_node_that_is_to_leave_retains_nothing(made: Any) -> None:
    stored = store(1, r0=[(0, 3)])
    node, _ = made(RetainedSnapshots({"ab": stored}, "job", 1e12))
    node._on_signal(signal.SIGTERM, None)
    node.end(LEADER_LOST_EXIT)
    assert node.retained is None and not stored.is_open and node.ended == ["process"]
