"""The control plane at scale: the real leader and supervisors on a cluster in memory, in virtual time
(virtual_cluster.py)."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from virtual_cluster import Cluster

from meshwright.elastic.cluster_agent import EventInbox
from meshwright.elastic.local_agent import ReadinessPoller

LEAST_SHARE = 0.05
"""Of a core, that the leader of 1,024 nodes may take while all is well."""

LOST = {"dies": 0, "hangs": 0, "node": 1, "link": 1, "leader": 1, "leader's link": 1}
"""Steps that a fault may cost: copies of ranks that have ended are where they were, those of a lost node are read from
its mirror, also by the leader that follows a lost one."""


def checked(cluster: Cluster) -> Cluster:
    """Every fault was healed, from memory, and cost no more steps than it may; nobody was told or holds more than it
    needs."""
    assert all(fault.healed for fault in cluster.told), cluster.notes[-20:]
    for fault in cluster.told:
        assert not fault.alone or (fault.source == "memory" and fault.lost <= LOST[fault.kind]), fault
    assert max(cluster.starts) <= 64_000, "bytes that a node got from a fault until ranks trained again"
    supervisors = [cluster.leader_files.most, *(host.most for host in cluster.hosts.values())]
    assert max(supervisors) <= 100, "files for copies; links, doors and pipes are less than 20 more"
    return cluster


def kinds_of(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_256_nodes_lose_one_of_them_and_go_on_from_its_mirror(tmp_path: Path) -> None:
    cluster = checked(Cluster(tmp_path, 256, kinds=("node",), step=1.0).train())
    kinds = kinds_of(tmp_path)
    assert len(cluster.told) == kinds.count("recovery") == kinds.count("node_lost") == 1 and "verdict" not in kinds


def test_a_message_from_another_thread_never_waits_for_the_loop() -> None:
    """10,000 messages before the loop looks, more than fit into the socket that wakes it (about 280)."""
    inbox = EventInbox(ReadinessPoller())
    try:
        sender = threading.Thread(target=lambda: [inbox.put({"number": number}) for number in range(10_000)])
        sender.daemon = True
        sender.start()
        sender.join(60.0)
        assert not sender.is_alive()
        assert inbox.poller.wait(0.0, 0.0) == [None]
        assert [message["number"] for _, message in inbox.take()] == [*range(10_000)]
    finally:
        inbox.close()


def test_ranks_that_end_or_hang_and_nodes_and_links_that_are_lost_cost_what_they_may(tmp_path: Path) -> None:
    kinds = ("dies", "node", "dies", "hangs", "link", "node", "dies")
    cluster = checked(Cluster(tmp_path, 8, kinds=kinds, step=2.0).train())
    assert tuple(fault.kind for fault in cluster.told) == kinds and kinds_of(tmp_path).count("recovery") == len(kinds)
    assert any("hung: reading its data, no sign of life" in note for note in cluster.notes)
    assert any("has been silent for 15 s" in note for note in cluster.notes)


@pytest.mark.soak
def test_leaders_that_are_lost_cost_no_more_than_other_nodes(tmp_path: Path) -> None:
    """One after the other, the second one after nodes and ranks were lost under it; each comes back as a node."""
    kinds = ("leader", "dies", "node", "leader", "leader's link", "leader", "hangs", "leader's link")
    cluster = checked(Cluster(tmp_path, 16, kinds=kinds, step=2.0).train())
    assert tuple(fault.kind for fault in cluster.told) == kinds and cluster.leads != 0
    assert {fault.source for fault in cluster.told} == {"memory"} and kinds_of(tmp_path).count("recovery") == len(kinds)


def test_faults_are_drawn_for_the_node_that_leads_too(tmp_path: Path) -> None:
    """Of three nodes, so that it is drawn often; the first of its losses is followed by others of the next leader."""
    cluster = checked(Cluster(tmp_path, 3, seed=23, faults=10, step=2.0).train())
    assert len(cluster.told) == 10 and {"leader", "leader's link", "node"} <= {fault.kind for fault in cluster.told}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_faults_of_three_nodes_cost_what_they_may(tmp_path: Path, seed: int) -> None:
    cluster = checked(Cluster(tmp_path, 3, seed=seed, faults=200, step=2.0).train())
    assert len(cluster.told) == 200


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    runs = [Cluster(tmp_path / str(number), 4, seed=3, faults=3, step=2.0).train() for number in range(2)]
    assert runs[0].told == runs[1].told and runs[0].now == runs[1].now


@pytest.mark.soak
def test_1024_nodes_train_for_30_days_at_the_published_rate_of_failures(tmp_path: Path) -> None:
    """Of the node that leads too, which is lost in every twentieth fault."""
    cluster = checked(Cluster(tmp_path, 1024, hours=30 * 24.0, leader_every=20).train())
    assert len(cluster.told) > 60, "116 are expected"
    assert sum(fault.kind == "leader" for fault in cluster.told) >= 3
    seconds, spent = (sum(values) for values in zip(*cluster.steady, strict=True))
    assert spent <= LEAST_SHARE * seconds
