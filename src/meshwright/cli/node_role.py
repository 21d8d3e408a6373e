"""Decides the role of this node in a training run on several machines: it leads, or it runs ranks for the leader.
`meshwright train` uses it.

Each node is started once, by any process launcher. `meshwright train` is a node, not a rank, if MESHWRIGHT_NODE is 1.
It is also a node if the number of started processes is the number of nodes, and the nodes have several devices each.
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (or Slurm's variables) give the number of the node and the address of the
first node.

The leader has the lock of the run folder (train/run_lock.py). The kernel or the file server releases the lock when the
leader's process dies. So there are never two leaders. The leader writes its number and address to RUN/leader. The file
is removed when the run ends, with or without an error; it remains if its writer is killed.

When a node loses its leader, its ranks end. Then the node does the first of these that applies:

1. It ends if RUN/leader does not exist, or if the run must not recover (`run.retries` is 0).
2. It leads if the lock is still free after `TURN_SECONDS` for each other node with a lower number.
3. It tries for `JOIN_SECONDS` to join the current leader, which may be the former leader or a new one.

A restarted first node joins another leader if there is one. Otherwise it leads again, and nodes that have lost their
leader join it. The leader waits for the remaining nodes as long as for a lost node. While nodes have no leader, each
node retains the in-memory snapshots of its ranks, and its replicas of other nodes' snapshots. A new leader starts from
the newest step for which the nodes have a snapshot of every rank (elastic/snapshot_inventory.py). Without such a step
it starts from the newest checkpoint on disk.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cli.leader_file import (
    LEADER_FILE,
    RETRY_SECONDS,
    STATUS_SECONDS,
    LeaderAddress,
    read_leader,
    read_run_id,
    retry_storage,
)
from meshwright.core import storage
from meshwright.core.errors import InputError, Interrupted, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.node_wait import JOIN_SECONDS

if TYPE_CHECKING:
    from meshwright.elastic.local_agent import LocalAgent
    from meshwright.elastic.snapshot_inventory import RetainedSnapshots
    from meshwright.planner.inputs.job import JobFile
    from meshwright.train.rank_main import ExternalLaunch

TURN_SECONDS = 1.0


@contextmanager
def announce_leader(folder: Path, place: NodeRole | None, note: Callable[[str], None]) -> Iterator[str]:
    """Writes this node to RUN/leader while the block runs, and records the loss of a previous leader in the event log.
    Yields the id of the run: the id that a killed leader left, otherwise a new one. On one machine (`place` is None)
    nothing is written and the id is empty. The caller must have the lock of the run folder."""
    from meshwright.elastic.event_log import record_event

    if place is None:
        yield ""
        return
    if place.after is not None:
        record_event(
            folder,
            note,
            kind="node_lost",
            node=str(place.after),
            cause=Message("it was the leader"),
            decision=Message("node {number} leads from here on", number=place.number),
        )
    path = folder / LEADER_FILE
    run = read_run_id(folder) or secrets.token_hex(8)
    with storage.failures_as_one_line(path):
        leader = LeaderAddress(place.number, place.host, place.port)._asdict()
        storage.replace_file(path, json.dumps({**leader, "run": run}), private=True)
    try:
        yield run
    finally:  # no error: the run has finished, and the next leader replaces a file that cannot be removed now
        if (error := storage.remove_if_possible(path)) is not None:
            note(storage.describe_failure(error, path))


def has_other_leader(place: NodeRole, folder: Path) -> bool:
    """Returns whether another node leads now."""
    from meshwright.train.run_lock import is_locked

    leader = read_leader(folder)
    return leader is not None and leader.number != place.number and is_locked(folder)


def has_lost_election(place: NodeRole, folder: Path) -> bool:
    """Returns whether another node leads, after this node could not acquire the lock of the run folder. The function
    reads the lock itself, because the new leader may write RUN/leader much later.

    Returns True if another node has the lock, or if the lock is free again. Returns False if this node has the lock, or
    if the process with the lock names no node within TURN_SECONDS (a run on one machine).
    """
    from meshwright.train.run_lock import is_locked, locking_node

    end = time.monotonic() + TURN_SECONDS  # the new leader writes its number shortly after it takes the lock
    while (holder := locking_node(folder)) is None and is_locked(folder) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_locked(folder) if holder is None else holder != place.number


def is_next_leader(place: NodeRole, lost: LeaderAddress, folder: Path, waited: float) -> bool:
    """Returns whether this node must lead now. `lost` is the previous leader, which has been missing for `waited`
    seconds. Nodes take turns in order of their numbers, one every TURN_SECONDS."""
    from meshwright.train.run_lock import is_locked

    before = place.number - (lost.number < place.number)
    return waited >= TURN_SECONDS * before and not is_locked(folder)


NODE_VARIABLE = "MESHWRIGHT_NODE"
TOKEN_FILE = "token"
DEFAULT_PORT = 29400


class NodeRole(NamedTuple):
    """This node among all nodes.

    - `devices` is the number of devices of each possible node, in order of their numbers; `started` is the number of
      started nodes.
    - `host` and `port` are the address of the leader.
    - `after` is the number of the previous leader, which is lost.
    - `warm` is the process that forked ranks on this node under the previous leader; `token` is that leader's token.
    """

    number: int
    started: int
    devices: tuple[int, ...]
    host: str
    port: int
    after: int | None = None
    warm: LocalAgent | None = None
    token: str = ""
    retained: RetainedSnapshots | None = None
    """The snapshots that this node had under the previous leader."""

    @property
    def world(self) -> int:
        """Returns the number of devices of all nodes."""
        return sum(self.devices)


def read_node_role(me: ExternalLaunch, job: Callable[[], JobFile], environment: Mapping[str, str]) -> NodeRole | None:
    """Returns the role of this process, or None if it is a rank. `job` is called only if the result depends on the job
    file.

    Raises: InputError if MESHWRIGHT_NODE is 1 and the number of started nodes differs from the number of nodes in the
    cluster. Fewer nodes are accepted if the job sets `run.min_ranks`.
    """
    from meshwright.planner.inputs.job import resolve_cluster

    requested = environment.get(NODE_VARIABLE) == "1"
    if not requested and int(environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_NTASKS_PER_NODE", 1))) > 1:
        return None
    file = job()
    cluster = resolve_cluster(file.cluster)
    if cluster.name.startswith("local"):
        devices = [cluster.devices] * me.world
    else:
        devices = [group.devices for group in cluster.groups for _ in range(group.nodes)]
        fewer = me.world < len(devices) and file.run.min_ranks
        if requested and len(devices) < me.world:
            raise InputError(
                Message(
                    "{world} nodes were started, but cluster {cluster!r} has {count}: start {count} nodes "
                    "(WORLD_SIZE), or name a cluster of {world} with --cluster",
                    world=me.world,
                    cluster=cluster.name,
                    count=len(devices),
                )
            )
        if requested and len(devices) != me.world and not fewer:
            raise InputError(
                Message(
                    "{node_variable}: {world} nodes were started, but cluster {cluster!r} has {count}: start one "
                    "process on each node, or allow fewer nodes with --set run.min_ranks=RANKS",
                    node_variable=NODE_VARIABLE,
                    world=me.world,
                    cluster=cluster.name,
                    count=len(devices),
                )
            )
        requested = requested or (len(devices) == me.world != cluster.devices)
    if not requested or me.world == 1:
        return None
    # Under torchrun, its own store already uses MASTER_PORT.
    port = int(environment.get("MASTER_PORT", DEFAULT_PORT)) + ("TORCHELASTIC_RUN_ID" in environment)
    return NodeRole(me.rank, me.world, tuple(devices), environment["MASTER_ADDR"], port)


def local_cluster_name(file: JobFile, place: NodeRole) -> str | None:
    """Returns the name `local:N` of the cluster of one node with N devices. Returns None if the job describes another
    cluster or sets the number of devices."""
    return f"local:{place.devices[0]}" if file.cluster.is_open_local else None


def serve_leader(
    place: NodeRole, file: JobFile, note: Callable[[str], None], lost: LeaderAddress | None = None
) -> int | NodeRole:
    """Runs the ranks of this node for the leader. Returns the exit code at the end of the run, or the new role of this
    node if it must lead.

    `lost` is the last known leader, if there was one.

    Raises: Interrupted if the leader is lost and this node must not continue the run.
    """
    from meshwright.cli.launch_plan import build_model_source, run_folder_of
    from meshwright.core.secure_channel import TOKEN_VARIABLE, SecureChannel, local_address_towards
    from meshwright.elastic.node import NodeAgent

    folder = run_folder_of(file, build_model_source(file)).resolve()
    own, warm, token, retained = place.host, place.warm, place.token, place.retained
    while True:
        came = _join_leader(place, folder, lost, os.environ.get(TOKEN_VARIABLE, ""), note)
        if came is None:
            assert lost is not None
            return place._replace(host=own, after=lost.number, warm=warm, token=token, retained=retained)
        end, hello, token, at = came
        own = local_address_towards(*at)
        note(
            Message(
                "node {number} of {started} at {own}, led by {leader}",
                number=place.number,
                started=place.started,
                own=own,
                leader=f"{at[0]}:{at[1]}",
            )
        )
        variables = {"MESHWRIGHT_ADDRESS": own, TOKEN_VARIABLE: token}
        node = NodeAgent(SecureChannel(end, hello), own, token, place.number, variables, warm)
        node.retained = retained
        code, line = node.run()
        warm, retained = None if node.agent.ended else node.agent, node.retained
        if line:
            note(Message("meshwright: {line}", line=line))
        recovers = code and not line and not node.leaving and file.run.retries
        lost = retry_storage(lambda: read_leader(folder), note) if recovers else None
        if lost is None and code and not line:
            raise Interrupted(
                Message(
                    "the leader node {leader} is gone: ranks of this node have ended; the same command joins again",
                    leader=f"{at[0]}:{at[1]}",
                )
            )
        if lost is None:
            return code
        note(
            Message(
                "the leader node {leader} is gone: ranks of this node have ended; this node waits for a new leader or "
                "becomes the leader",
                leader=f"{at[0]}:{at[1]}",
            )
        )


def _join_leader(
    place: NodeRole,
    folder: Path,
    lost: LeaderAddress | None,
    given: str,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[socket.socket, dict[str, object], str, tuple[str, int]] | None:
    """Connects to the leader. Returns the connection, the leader's greeting, the token and the address. Returns None if
    this node must lead because `lost` is dead.

    `given` is the token from the environment. If it is empty, the leader writes a token to the run folder.

    Raises: InputError at once if the given token is refused and `lost` is None. Raises MeshwrightError (Interrupted
    with `lost`) if no connection succeeds within `JOIN_SECONDS`, and Interrupted if the run has ended.
    """
    from meshwright.core.secure_channel import AuthenticationError, open_channel, read_token

    name, devices = f"{place.number} ({socket.gethostname()})", place.devices[place.number]
    me = {"name": name, "devices": devices, "order": place.number, "lost": lost is not None}
    began, why, said = time.monotonic(), "", time.monotonic()
    while (now := time.monotonic()) < began + JOIN_SECONDS:
        addresses: list[tuple[str, int]] = []
        try:
            token = given or read_token(folder / TOKEN_FILE)
            found = _leader_addresses(place, lost, folder, now - began)
            if found is None:
                return None
            addresses = found
        except storage.StorageFailed as error:  # whether a node leads is unknown until the file system answers
            why = str(error)
        for at in addresses:
            try:
                if token:
                    return *open_channel(*at, token, me), token, at
                why = address_problem(*at) or Message(
                    "the first node has not written its token to {folder!r} yet: start it, or set MESHWRIGHT_TOKEN on "
                    "all nodes if they do not share this folder",
                    folder=str(folder),
                )
            except AuthenticationError as error:
                if error.wrong_token and given and lost is None:
                    raise _refused_token(place, error) from None
                why = str(error)
            except (OSError, ValueError) as error:
                why = str(error)
        if now > said + STATUS_SECONDS:
            said = now
            note(_waiting_line(place, now - began, why))
        time.sleep(RETRY_SECONDS)
    failure = MeshwrightError if lost is None else Interrupted  # a run that has begun resumes with the same command
    raise failure(
        Message(
            "node {number} found no leader at {host}:{port} within {seconds:.0f} s: {why}",
            number=place.number,
            host=place.host,
            port=place.port,
            seconds=JOIN_SECONDS,
            why=why,
        )
    )


def address_problem(host: str, port: int) -> str:
    """Returns why the name `host` of the leader has no address, as a line with the remedy, or ''. The line is no error
    yet: in Kubernetes, a name has no address until its pod runs."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return Message(
            "MASTER_ADDR {host!r} has no address ({reason}): set the name or address of the first node",
            host=host,
            reason=error.strerror or error,
        )
    return ""


def _leader_addresses(
    place: NodeRole, lost: LeaderAddress | None, folder: Path, waited: float
) -> list[tuple[str, int]] | None:
    """Returns the addresses at which a leader may listen, or None if this node must lead because `lost` is dead.

    Raises: Interrupted if the run has ended, StorageFailed if the file system does not answer.
    """

    leader = read_leader(folder)
    if lost is not None and leader is None:
        raise Interrupted(Message("the run has ended without this node; the same command joins it again"))
    if lost is not None and leader == lost and is_next_leader(place, lost, folder, waited):
        return None
    found = [(leader.host, leader.port)] if leader else []
    return list(dict.fromkeys(found + ([(place.host, place.port)] if lost is None else [])))


def _waiting_line(place: NodeRole, seconds: float, why: str) -> Message:
    """Returns the status line of a node that has no leader after `seconds`."""
    return Message(
        "node {number} has found no leader for {seconds:seconds}: {why}",
        number=place.number,
        seconds=seconds,
        why=why or Message("no node answers"),
    )


def _refused_token(place: NodeRole, error: Exception) -> Exception:
    """Returns the error of a node whose token the leader refuses."""

    return InputError(
        Message(
            "node {number}: {error}: give all nodes of a run the same MESHWRIGHT_TOKEN, and each run a port of its own",
            number=place.number,
            error=error,
        )
    )
