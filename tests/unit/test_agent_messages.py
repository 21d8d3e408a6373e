"""What a start of ranks says and opens does not grow with the world: a leader with nodes that only take down what they
are told."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.ipc import message_line
from meshwright.core.secure_channel import SecureChannel, open_channel
from meshwright.core.snapshots import read_snapshot_locations
from meshwright.elastic.attempt import Attempt, RankJob
from meshwright.elastic.cluster_agent import ClusterAgent, _NodeConnection
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.shared_files import SharedFileStore

EACH = 8
"""Ranks of a node."""


class NoProcess(LocalAgent):
    """Takes down what it is told."""

    def _open(self) -> None:
        self.ended, self.commands = False, list[dict[str, Any]]()

    def command(self, do: str, rank: int, **more: Any) -> None:
        self.commands.append({"do": do, "rank": rank, **more})

    def close(self) -> None:
        self.ended = True


class Leader(ClusterAgent, NoProcess):
    """Of nodes that are not there."""


class Taken(SecureChannel):
    """The leader's end of a link to a node: the lines that are sent."""

    def __init__(self, order: int) -> None:
        self.hello, self.lines = {"order": order}, list[bytes]()

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Any]:
    made = list[Leader]()

    def lead(nodes: int) -> Leader:
        (tmp_path / "logs").mkdir(exist_ok=True)
        leader = Leader(tmp_path / "logs", (), "127.0.0.1", 0, "secret", EACH)
        made.append(leader)
        for number in range(1, nodes):
            address = f"10.{100 + number // 256}.{number % 256}.200:41234"
            leader.nodes.append(_NodeConnection(f"{number} (host)", Taken(number), EACH, 1e18, EACH * number, address))
            leader.homes.alive.add(address)
        return leader

    yield lead
    for leader in made:
        leader.dissolve()


def started(leader: Leader, holdings: SharedFileStore, generation: int) -> list[list[bytes]]:
    """The lines that each node gets."""
    for node in leader.nodes:
        node.ranks.clear()
        node.link.lines.clear()
    leader.commands.clear()
    work = RankJob("module:function", holdings.world, {"launch": "x" * 2000}, Path("run"), slots=leader.slots)
    Attempt(work, generation, lambda *_: None).start(leader, holdings, holdings)
    return [node.link.lines for node in leader.nodes]


@pytest.mark.parametrize("nodes", [8, 1024])
def test_a_start_says_of_each_rank_the_same_number_of_bytes_in_any_world(led: Any, nodes: int) -> None:
    """Two generations: before there are copies, and then. Of 1,024 nodes of 8 ranks a node gets at most 64 KB, where
    1,024 ranks took 373 KB."""
    leader, holdings = led(nodes), SharedFileStore(nodes * EACH)
    for generation in range(2):
        told = started(leader, holdings, generation)
        assert len(told) == nodes - 1 and len({lines[0] for lines in told}) == 1, (
            "the same line says to all nodes where copies lie"
        )
        assert max(len(start) for _, start in told) < 3200
        assert max(sum(map(len, lines)) for lines in told) <= 64_000
        assert max(len(json.dumps(command)) for command in leader.commands) < 3200
    runs = json.loads(told[0][0])["runs"]
    assert (
        runs[0] == [leader._snapshots.server.address, EACH]
        and runs[-1] == [leader.nodes[-1].lender, EACH]
        and len(runs) == nodes
    )
    table = read_snapshot_locations(leader.commands[0]["memory"]["sources"])
    assert (
        table[0] == leader.commands[0]["memory"]["own"]
        and table[-1] == f"at:{leader.nodes[-1].lender}/{holdings.key}/{nodes * EACH - 1}"
    )
    holdings.close()


def test_a_supervisor_opens_files_for_the_ranks_of_its_own_machine_alone(led: Any) -> None:
    """It opened one for each rank of the world: 1,026 at 1,024 ranks."""
    leader = led(1024)
    gc.collect()  # files of tests before this one
    before = len(os.listdir("/proc/self/fd"))
    holdings = SharedFileStore(1024 * EACH)
    for generation in range(2):
        started(leader, holdings, generation)
        assert (
            len(os.listdir("/proc/self/fd")) - before <= EACH + 3
        )  # the signs of life, which are mapped as well, and the table of places
    holdings.close()


def test_copies_that_nobody_can_be_told_of_any_more_are_closed() -> None:
    holdings = SharedFileStore(100)
    for rank in range(20):
        holdings.file(rank)
    holdings.release([3, 4, 50])
    assert [rank for rank in range(100) if holdings.source(rank) != "nowhere:"] == [3, 4]
    holdings.close()
    with pytest.raises(OSError, match="closed"):
        holdings.file(3)


def test_a_node_is_there_once_it_has_said_where_its_copies_are_read_and_not_before(led: Any) -> None:
    """Ranks that were given to it sooner had copies that nobody could find: the next fault cost what their mirror
    lagged behind, or all steps since the
    checkpoint."""
    leader = led(1)
    leader.ended = True  # no process of ranks is waited for
    ours, _ = open_channel("127.0.0.1", leader.port, "secret", {"name": "b", "devices": 2, "order": 1})
    assert leader.events(60.0) == [] and leader.places == EACH
    ours.sendall(message_line({"event": "lends", "address": "10.0.0.2:5"}))
    assert leader.events(60.0) == [{"event": "node_joined", "name": "b", "devices": 2}]
    assert leader.places == EACH + 2 and leader.nodes[0].lender == "10.0.0.2:5"
    ours.close()
