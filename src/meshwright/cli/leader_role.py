"""Gathers the nodes of a training run on several machines around the node that leads it. `meshwright train` uses it on
the leading node, which node_role.py determines."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshwright.cli.leader_file import RETRY_SECONDS
from meshwright.cli.node_role import TOKEN_FILE, NodeRole, address_problem
from meshwright.core import storage
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.node_wait import JOIN_SECONDS, WAIT_NOTE_SECONDS, ended_without_save, too_few_nodes, waiting_line

if TYPE_CHECKING:
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.cluster_agent import ClusterAgent
    from meshwright.spec.job import RunConfig


@contextmanager
def lead_nodes(place: NodeRole, work: RankJob, note: Callable[[str], None], run: RunConfig) -> Iterator[ClusterAgent]:
    """Waits until the nodes have joined, and yields one agent that controls the ranks of all nodes. All ranks end at
    the end of the block.

    Raises: InputError if this node cannot listen; MeshwrightError if too few nodes join.
    """
    from meshwright.core.secure_channel import TOKEN_VARIABLE
    from meshwright.elastic.cluster_agent import ClusterAgent

    token, path = os.environ.get(TOKEN_VARIABLE) or place.token or secrets.token_hex(32), work.folder / TOKEN_FILE
    with storage.failures_as_one_line(work.folder):
        storage.make_folder(work.logs)
        if TOKEN_VARIABLE not in os.environ:
            # other nodes read the token from this file, which may still have the token of a dead leader
            storage.replace_file(path, token, private=True)
    if problem := address_problem(place.host, place.port):
        raise InputError(problem)
    host = socket.gethostbyname(place.host)
    try:
        devices, nodes = place.devices[place.number], len(place.devices) - 1
        fleet = ClusterAgent(work.logs, work.warm, host, place.port, token, devices, place.warm, nodes)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                Message(
                    "another run on this node uses {host}:{port}: set MASTER_PORT to a free port on all nodes, or end "
                    "that run",
                    host=place.host,
                    port=place.port,
                )
            ) from None
        raise InputError(
            Message(
                "the leader node cannot listen at {host}:{port} ({strerror}): set MASTER_ADDR and MASTER_PORT",
                host=place.host,
                port=place.port,
                strerror=error.strerror,
            )
        ) from None
    code = 1
    line: str = Message("the leader node failed")
    try:
        await_nodes(fleet, place, note, run)
        yield fleet
        code, line = 0, ""
    except MeshwrightError as error:
        code, line = error.exit_code, str(error).partition("\n")[0]
        raise
    finally:
        fleet.end(code, line)
        fleet.dissolve()
        if (failed := storage.remove_if_possible(path)) is not None:
            note(storage.describe_failure(failed, path))


def continues_run(fleet: ClusterAgent, place: NodeRole) -> bool:
    """Returns whether the run of a lost leader resumes here: this node replaces that leader, or another joined node has
    lost it."""
    return place.after is not None or any(node.link.hello.get("lost") for node in fleet.nodes)


def await_nodes(fleet: ClusterAgent, place: NodeRole, note: Callable[[str], None], run: RunConfig) -> None:
    """Waits until all nodes have joined, for at most JOIN_SECONDS. If this node or a joined node has lost its leader,
    the wait for the missing nodes is `run.rejoin_timeout` seconds. After the wait the run starts without the missing
    nodes if `run.min_ranks` is set or a leader was lost, and the joined nodes have at least `run.min_ranks` ranks. If
    they have fewer, and a leader was lost, the wait goes on for at most JOIN_SECONDS in all.

    Raises: MeshwrightError if too few nodes join, Interrupted if a leader was lost before.
    """
    from meshwright.elastic.restart_policy import call_with_retries

    heir, began, ready = place.after is not None, fleet.outside.clock(), False
    is_later, patience, said = heir, run.rejoin_timeout if heir else JOIN_SECONDS, began
    note(_first_waiting_line(fleet, place))
    loading = _ForkServerLoading(fleet, run.retries, note)
    while not ready or 1 + len(fleet.nodes) < place.started - heir:
        for event in call_with_retries(lambda: fleet.events(RETRY_SECONDS), run.retries, note):
            ready = ready or event["event"] == "ready"
            if event["event"] == "node_joined":
                note(Message("node {name} has joined", name=event["name"]))
            elif event["event"] == "refusal":
                note(event["line"])
        if not ready:
            loading.look(is_later)
        now = fleet.outside.clock()
        waited, places = now - began, len(fleet.slots)
        if not is_later and continues_run(fleet, place):
            is_later, patience = True, waited + run.rejoin_timeout
        if not ready or waited <= patience or 1 + len(fleet.nodes) >= place.started - heir:
            continue
        if (run.min_ranks or is_later) and places >= run.min_ranks:
            return
        limit = max(patience, JOIN_SECONDS)
        if not is_later or waited > limit:
            raise _too_few_nodes(fleet, place, is_later, patience, run.min_ranks)
        if now >= said + WAIT_NOTE_SECONDS:
            said = now
            note(waiting_line(places, place.world, run.min_ranks, waited, limit))


class _ForkServerLoading:
    """Watches the fork server of the leading node until it is ready. It is replaced up to `retries` times if it is not
    ready within FORK_SERVER_SECONDS, or if it ends in a run that has begun before."""

    def __init__(self, fleet: ClusterAgent, retries: int, note: Callable[[str], None]) -> None:
        self.fleet, self.note, self._left, self._since = fleet, note, retries, fleet.outside.clock()

    def look(self, is_later: bool) -> None:
        """Replaces the fork server if it has failed. `is_later`: whether the run has begun before.

        Raises: RankFailed after the last retry.
        """
        from meshwright.elastic.failure import (
            RankFailed,
            failure_cause,
            fork_server_error,
            fork_server_exit,
            fork_server_hang,
        )
        from meshwright.elastic.hang_detector import FORK_SERVER_SECONDS

        now = self.fleet.outside.clock()
        if not self.fleet.ended and now <= self._since + FORK_SERVER_SECONDS:
            return
        ended = self.fleet.ended
        first = (
            fork_server_exit(self.fleet.status(), self.fleet.log)
            if ended
            else fork_server_hang(now, FORK_SERVER_SECONDS)
        )
        if not self._left or (ended and not is_later):
            cause = failure_cause(first)
            raise fork_server_error(first.status, self.fleet.log) if ended else RankFailed(cause)
        self.note(Message("{cause}: {decision}", cause=failure_cause(first), decision=Message("it starts again")))
        self._left, self._since = self._left - 1, now
        self.fleet.again()


def _first_waiting_line(fleet: ClusterAgent, place: NodeRole) -> Message:
    """Returns the line of a leader that begins to wait for nodes."""
    if place.after is not None:
        return Message(
            "node {number} of {started} at {host}:{port}, the new leader after node {after}, waiting for the others",
            number=place.number,
            started=place.started,
            host=fleet.host,
            port=place.port,
            after=place.after,
        )
    return Message(
        "node {number} of {started} at {host}:{port}, waiting for the others",
        number=place.number,
        started=place.started,
        host=fleet.host,
        port=place.port,
    )


def _too_few_nodes(
    fleet: ClusterAgent, place: NodeRole, is_later: bool, patience: float, min_ranks: int
) -> MeshwrightError:
    """Returns the error of a leader that too few nodes have joined. `is_later`: whether the run has begun before."""
    if is_later:
        return ended_without_save(too_few_nodes(len(fleet.slots), min_ranks))
    return MeshwrightError(
        Message(
            "{value} of {started} nodes connected to {host}:{port} within {patience:.0f} s; start the same command on "
            "each node, or allow fewer nodes with --set run.min_ranks=RANKS",
            value=1 + len(fleet.nodes),
            started=place.started,
            host=fleet.host,
            port=place.port,
            patience=patience,
        )
    )
