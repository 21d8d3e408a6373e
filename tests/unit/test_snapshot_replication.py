"""How many steps a lost node costs: rounds of mirrors in virtual time, with ranks that step, links that copy and orders
that fail."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.ipc import HeartbeatField
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_replication import MAX_STEPS_AHEAD, ROUNDS_BEFORE_SHRINK, ReplicationCoordinator

STEP = 1.0
"""Seconds of a step."""


@dataclass
class Other:
    """The second of two nodes."""

    name: str = "1"
    lender: str = "10.0.0.2:1"
    ranks: dict[int, int] = field(default_factory=lambda: {1: 0})


class Links:
    """Two nodes of one rank each. A round is whole `copy` seconds after its step is there; rounds in `fails` find that
    it was written over, at once."""

    def __init__(self, copy: float, fails: range = range(0)) -> None:
        self.now, self.copy, self.fails, self.rounds = 0.0, copy, fails, 0
        self.holdings = SharedFileStore(2)
        self.waits: list[tuple[float, dict[str, Any]]] = []
        self.mirrors = ReplicationCoordinator(
            "10.0.0.1:1", SnapshotLocations(), self, lambda *_, **__: None, lambda: self.now
        )  # type: ignore[arg-type]
        self.mirrors.begin(self.holdings)
        self.whole, self.lost = 0, list[int]()

    def order(self, order: Any) -> None:
        """As a mirror does."""
        for file in order.files.values():
            os.close(file)
        failed = self.rounds in self.fails
        self.rounds += 1
        there = max(self.now, order.step * STEP)
        at = self.now + 0.01 if failed else there + self.copy
        said = {"number": order.number, "whole": not failed, "seconds": 0.0 if failed else self.copy}
        self.waits.append((at, {**said, "step": order.step}))

    def run(self, steps: int) -> None:
        for tick in range(steps * 100):
            self.now = tick / 100
            for rank in range(2):
                self.holdings.pulse(rank).write(HeartbeatField.snapshot_step, int(self.now / STEP))
            for at, message in [each for each in self.waits if each[0] <= self.now]:
                self.waits.remove((at, message))
                self.mirrors.heard(message)
                self.whole = message["step"] if message["whole"] else self.whole
            self.mirrors.look([Other()], 1)
            if self.whole:
                self.lost.append(int(self.now / STEP) - self.whole)


@pytest.mark.parametrize("copy", [0.05, 0.3, 1.0, 3.0])
def test_a_lost_node_costs_no_more_steps_than_copies_take(copy: float) -> None:
    links = Links(copy)
    links.run(100)
    assert max(links.lost) <= 1 + 3 * copy / STEP
    links.holdings.close()


def test_small_states_cost_two_steps_at_most_also_after_orders_that_came_too_late() -> None:
    """After each failure steps were ordered earlier for good, and links rested while they waited for those: 6 steps
    were lost."""
    links = Links(0.05, fails=range(5, 8))
    links.run(20)
    links.lost.clear()
    links.run(400)
    later = links.lost[len(links.lost) // 2 :]
    assert max(later) <= 2
    links.holdings.close()


def test_orders_that_always_come_too_late_are_made_no_more_than_so_many_steps_ahead() -> None:
    """It was never said: a lost node then cost the steps since the last checkpoint on disk."""
    links = Links(0.05, fails=range(200))
    links.run(20)
    [said] = links.mirrors.take_reports()
    assert (said["event"], said["decision"]) == ("degraded", "tried again") and said["line"] == (
        "snapshots are not mirrored: a lost node now costs the steps since the last checkpoint (in 8 rounds in a row, "
        "ranks overwrote their snapshots before they were copied)"
    )
    assert (
        links.rounds > MAX_STEPS_AHEAD
        and max(message["step"] for _, message in links.waits) <= int(links.now) + MAX_STEPS_AHEAD
    )
    links.holdings.close()


def test_late_rounds_are_said_at_the_greatest_distance_only_and_so_is_their_end() -> None:
    few = Links(0.05, fails=range(MAX_STEPS_AHEAD + ROUNDS_BEFORE_SHRINK - 1))
    many = Links(0.05, fails=range(MAX_STEPS_AHEAD + ROUNDS_BEFORE_SHRINK))
    for links, kinds in ((few, []), (many, ["degraded", "notice"])):
        links.run(200)
        assert [said["event"] for said in links.mirrors.take_reports()] == kinds
        links.holdings.close()


def test_the_ranks_of_the_leader_are_mirrored_as_those_of_other_nodes() -> None:
    """A ring that begins with the leader: each node copies those of the one before it."""
    orders: list[tuple[str, str, list[int], int]] = []
    holdings, homes = SharedFileStore(3), SnapshotLocations()

    def order(request: Any) -> None:
        orders.append(("here", request.address, sorted(request.files), request.number))
        for file in request.files.values():
            os.close(file)

    def tell(node: Other, do: str, **more: Any) -> None:
        if do == "mirror":
            orders.append((node.name, more["address"], more["ranks"], more["number"]))

    here = "10.0.0.1:1"
    rounds = ReplicationCoordinator(here, homes, SimpleNamespace(order=order), tell)  # type: ignore[arg-type]
    nodes = [Other(), Other("2", "10.0.0.3:1", {2: 0})]
    homes.alive |= {here, *(node.lender for node in nodes)}
    homes.start([here, *(node.lender for node in nodes)], holdings.key, holdings.key)
    rounds.begin(holdings)
    for rank in range(3):
        holdings.pulse(rank).write(HeartbeatField.snapshot_step, 5)
    rounds.look(nodes, 2, [0])
    assert [each[:3] for each in orders] == [
        ("1", here, [0]),
        ("2", "10.0.0.2:1", [1]),
        ("here", "10.0.0.3:1", [2]),
    ]
    for *_, number in orders:
        rounds.heard({"number": number, "whole": True, "seconds": 0.0})
    homes.alive.discard(here)
    assert homes._found(holdings.key) == ["10.0.0.2:1", "10.0.0.2:1", "10.0.0.3:1"]
    holdings.close()
