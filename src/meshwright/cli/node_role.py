"""Who leads a run on several machines when the node that led is gone: the first of the others, by number, that gets the
lease of the run folder.

Rule: whoever leads holds the lease (train/run_lock.py), which the kernel or the file server frees when its holder dies,
however it dies; so there are
never two leaders. It writes RUN/leader: its number and where it listens; the file goes when the run ends, in order or
by an error that is said, and
stays when its writer is killed. A node that has lost its leader, whose ranks have ended with it,

1. ends too where RUN/leader is gone, or the run is not to be healed (`run.retries` 0);
2. leads when the lease is free and its turn has come: TURN seconds for each other node of a lower number;
3. else joins whoever leads, the same one as before or another, until ARRIVE seconds are over.

A first node that is started again while another one leads, or becomes the leader before it, joins that one; where it
leads again itself, nodes that
have lost their leader come to it, and it waits for the others as long as for one that is lost. The new leader begins as
any does: from the newest
checkpoint on disk, with a store and generations of its own; the copies of the lost node's ranks went with it.

`meshwright train` as one of several nodes: the first one leads (succession.py: or the one after it), the others serve
it. Each is started once,
by whatever starts processes.

Rule: a process is a node, not a rank, when MESHWRIGHT_NODE is 1, or when as many processes were started as the cluster
has nodes and these have several
devices each. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which node it is and where the first one is; so do
Slurm's names.

Ranks that another launcher started, in what they do together and keep nothing of: a probe, trials.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.core.errors import Interrupted, MeshwrightError
from meshwright.core.files import write_atomically
from meshwright.core.signals import stop_signal_handler
from meshwright.core.units import show_seconds

if TYPE_CHECKING:
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.cluster_agent import ClusterAgent
    from meshwright.elastic.local_agent import LocalAgent
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.run import RunConfig
    from meshwright.train.rank_main import ExternalLaunch

LEADER_FILE = "leader"
TURN_SECONDS = 1.0


class LeaderAddress(NamedTuple):
    """A node and where it listens for the others."""

    number: int
    host: str
    port: int


def read_leader(folder: Path) -> LeaderAddress | None:
    """Who leads the run in `folder`, or led it until it died; None where nobody does."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((folder / LEADER_FILE).read_text())
        return LeaderAddress(int(found["number"]), str(found["host"]), int(found["port"]))
    return None


@contextmanager
def announce_leader(folder: Path, place: NodeRole | None, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, the others find this node by RUN/leader, and the event log says who led before. Whoever enters holds the
    lease."""
    from meshwright.elastic.event_log import EventLog

    if place is None:
        yield
        return
    if place.after is not None:
        EventLog(folder, note).write(
            kind="node_lost", node=str(place.after), cause="it led", decision=f"node {place.number} leads from here on"
        )
    write_atomically(
        folder / LEADER_FILE, json.dumps(LeaderAddress(place.number, place.host, place.port)._asdict()), private=True
    )
    try:
        yield
    finally:
        (folder / LEADER_FILE).unlink(missing_ok=True)


def has_other_leader(place: NodeRole, folder: Path) -> bool:
    """Whether a node of another number leads now."""
    from meshwright.train.run_lock import is_locked

    leader = read_leader(folder)
    return leader is not None and leader.number != place.number and is_locked(folder)


def has_lost_election(place: NodeRole, folder: Path) -> bool:
    """The same once this node was refused the lease, by what the lease itself says: its holder may need long until it
    writes RUN/leader."""
    from meshwright.train.run_lock import is_locked, locking_node

    end = time.monotonic() + TURN_SECONDS  # a moment lies between taking the lease and writing who has it
    while (holder := locking_node(folder)) is None and is_locked(folder) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_locked(folder) if holder is None else holder != place.number


def is_next_leader(place: NodeRole, lost: LeaderAddress, folder: Path, waited: float) -> bool:
    """Whether this node is to lead after `lost`, which has been gone for `waited` seconds."""
    from meshwright.train.run_lock import is_locked

    before = place.number - (lost.number < place.number)
    return waited >= TURN_SECONDS * before and not is_locked(folder)


NODE_VARIABLE = "MESHWRIGHT_NODE"
JOIN_SECONDS = 300.0
"""Seconds that nodes get to come."""

RETRY_SECONDS = 0.2

STATUS_SECONDS = 5.0
"""Seconds between lines about a node that leads and is not found."""

DEFAULT_PORT = 29400


class NodeRole(NamedTuple):
    """This node among all. `devices`: of each node that there may be, in order; `started`: how many were. `host` and
    `port`: of the one that leads;
    `after`: the number of the one that led before, which is gone; `warm`: the process that forked ranks here under that
    one; `token`: that one's."""

    number: int
    started: int
    devices: tuple[int, ...]
    host: str
    port: int
    after: int | None = None
    warm: LocalAgent | None = None
    token: str = ""

    @property
    def world(self) -> int:
        return sum(self.devices)


def read_node_role(me: ExternalLaunch, job: Callable[[], JobFile], environment: Mapping[str, str]) -> NodeRole | None:
    """The node that this process is; None when it is a rank. `job` is read where it matters."""
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.job import resolve_cluster

    asked = environment.get(NODE_VARIABLE) == "1"
    if not asked and int(environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_NTASKS_PER_NODE", 1))) > 1:
        return None
    file = job()
    cluster = resolve_cluster(file.cluster)
    if cluster.name.startswith("local"):
        devices = [cluster.devices] * me.world
    else:
        devices = [group.devices for group in cluster.groups for _ in range(group.nodes)]
        fewer = me.world < len(devices) and file.run.min_ranks
        if asked and len(devices) != me.world and not fewer:
            raise InputError(
                f"{NODE_VARIABLE}: {me.world} nodes were started and cluster {cluster.name!r} has {len(devices)}: start one process on each, or let "
                "the run go on with fewer: --set run.min_ranks=RANKS"
            )
        asked = asked or (len(devices) == me.world != cluster.devices)
    if not asked or me.world == 1:
        return None
    port = int(environment.get("MASTER_PORT", DEFAULT_PORT)) + (
        "TORCHELASTIC_RUN_ID" in environment
    )  # torchrun's own store has that one
    return NodeRole(me.rank, me.world, tuple(devices), environment["MASTER_ADDR"], port)


def local_cluster_name(file: JobFile, place: NodeRole) -> str | None:
    """The cluster of one node in words, where it was left to this machine how many devices it has."""
    return (
        f"local:{place.devices[0]}"
        if file.cluster.name == "local" and not file.cluster.path and not file.cluster.groups
        else None
    )


@contextmanager
def lead_nodes(place: NodeRole, work: RankJob, note: Callable[[str], None], run: RunConfig) -> Iterator[ClusterAgent]:
    """The ranks of all nodes as one nursery, once the nodes have come. They end as the block does."""
    from meshwright.core.errors import InputError, MeshwrightError
    from meshwright.core.files import write_atomically
    from meshwright.core.secure_channel import TOKEN_VARIABLE
    from meshwright.elastic.cluster_agent import ClusterAgent

    work.logs.mkdir(parents=True, exist_ok=True)
    token = os.environ.get(TOKEN_VARIABLE) or place.token or secrets.token_hex(32)
    if TOKEN_VARIABLE not in os.environ:
        write_atomically(
            work.folder / "token", token, private=True
        )  # also one that others know: what a dead leader wrote may be another
    host = socket.gethostbyname(place.host)
    try:
        fleet = ClusterAgent(work.logs, work.warm, host, place.port, token, place.devices[place.number], place.warm)
    except OSError as error:
        raise InputError(
            f"the node that leads cannot listen at {place.host}:{place.port} ({error.strerror}): set MASTER_ADDR and MASTER_PORT"
        ) from None
    code, line = 1, "the node that leads failed"
    try:
        _await_nodes(fleet, place, note, run)
        yield fleet
        code, line = 0, ""
    except MeshwrightError as error:
        code, line = error.exit_code, str(error).partition("\n")[0]
        raise
    finally:
        fleet.end(code, line)
        fleet.dissolve()
        (work.folder / "token").unlink(missing_ok=True)


def continues_run(fleet: ClusterAgent, place: NodeRole) -> bool:
    """Whether the run of a leader that is gone goes on here: this node follows that one, or another one that has come
    has lost it."""
    return place.after is not None or any(node.link.hello.get("lost") for node in fleet.nodes)


def _await_nodes(fleet: ClusterAgent, place: NodeRole, note: Callable[[str], None], run: RunConfig) -> None:
    """Until all nodes have come; where some of them have lost their leader the others get as long as one that comes
    back."""
    from meshwright.core.errors import MeshwrightError

    heir, began, ready = place.after is not None, fleet.outside.clock(), False
    is_later, patience = heir, run.rejoin_timeout if heir else JOIN_SECONDS
    if heir:
        note(
            f"node {place.number} of {place.started} at {fleet.host}:{place.port}, leads in the place of node {place.after}, waiting for the others"
        )
    else:
        note(f"node {place.number} of {place.started} at {fleet.host}:{place.port}, waiting for the others")
    while not ready or 1 + len(fleet.nodes) < place.started - heir:
        for event in fleet.events(RETRY_SECONDS):
            ready = ready or event["event"] == "ready"
            if event["event"] == "node_joined":
                note(f"node {event['name']} has come")
            elif event["event"] == "refusal":
                note(event["line"])
        waited = fleet.outside.clock() - began
        if not is_later and continues_run(fleet, place):
            is_later, patience = True, waited + run.rejoin_timeout
        if waited > patience and ready:
            if (run.min_ranks or is_later) and len(fleet.slots) >= run.min_ranks:
                return
            raise MeshwrightError(
                f"{1 + len(fleet.nodes)} of {place.started} nodes came to {fleet.host}:{place.port} within {patience:.0f} s; "
                "start the same command on each, or let the run go on with fewer: --set run.min_ranks=RANKS"
            )


def serve_leader(
    place: NodeRole, file: JobFile, note: Callable[[str], None], lost: LeaderAddress | None = None
) -> int | NodeRole:
    """Ranks of this node, as the node that leads says; its exit code when the run is over, or the place from which this
    node is to lead (succession.py).
    `lost`: the leader that it knows, where it has had one."""
    from meshwright.cli.launch_plan import build_model_source, run_folder_of
    from meshwright.core.errors import Interrupted
    from meshwright.core.secure_channel import TOKEN_VARIABLE, SecureChannel, local_address_towards
    from meshwright.elastic.node import NodeAgent

    folder, own, warm, token = (
        run_folder_of(file, build_model_source(file)).resolve(),
        place.host,
        place.warm,
        place.token,
    )
    while True:
        came = _join_leader(place, folder, lost, os.environ.get(TOKEN_VARIABLE, ""), note)
        if came is None:
            assert lost is not None
            return place._replace(host=own, after=lost.number, warm=warm, token=token)
        end, hello, token, at = came
        own = local_address_towards(*at)
        note(f"node {place.number} of {place.started} at {own}, led by {at[0]}:{at[1]}")
        node = NodeAgent(
            SecureChannel(end, hello),
            own,
            token,
            place.number,
            {"MESHWRIGHT_ADDRESS": own, TOKEN_VARIABLE: token},
            warm,
        )
        code, line = node.run()
        warm = None if node.nursery.ended else node.nursery
        if line:
            note(f"meshwright: {line}")
        lost = read_leader(folder) if code and not line and not node.leaving and file.run.retries else None
        if lost is None and code and not line:
            raise Interrupted(
                f"the node that led, {at[0]}:{at[1]}, is gone: ranks of this node have ended; the same command joins again"
            )
        if lost is None:
            return code
        note(
            f"the node that led, {at[0]}:{at[1]}, is gone: ranks of this node have ended; it waits for one that leads, or leads itself"
        )


def _join_leader(
    place: NodeRole,
    folder: Path,
    lost: LeaderAddress | None,
    given: str,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[socket.socket, dict[str, object], str, tuple[str, int]] | None:
    """The connection to the node that leads, what that says, the token, and its address; None where this node is to
    lead, `lost` being
    gone. `given`: the token, where whoever started this process gave it one; else whoever leads writes one.

    Raises: InputError at once where the token that was given is refused; MeshwrightError or Interrupted when no node
    leads within ARRIVE seconds.
    """
    from meshwright.core.errors import InputError, Interrupted, MeshwrightError
    from meshwright.core.secure_channel import AuthenticationError, open_channel, read_token

    name, devices = f"{place.number} ({socket.gethostname()})", place.devices[place.number]
    me = {"name": name, "devices": devices, "order": place.number, "lost": lost is not None}
    began, why, said = time.monotonic(), "", time.monotonic()
    while (now := time.monotonic()) < began + JOIN_SECONDS:
        token, leader = given or read_token(folder / "token"), read_leader(folder)
        if lost is not None and leader is None:
            raise Interrupted("the run has ended without this node; the same command joins it again")
        if lost is not None and leader == lost and is_next_leader(place, lost, folder, now - began):
            return None
        for at in dict.fromkeys(
            [*([(leader.host, leader.port)] if leader else []), *([(place.host, place.port)] if lost is None else [])]
        ):
            try:
                if token:
                    return *open_channel(*at, token, me), token, at
                why = f"no token: set MESHWRIGHT_TOKEN on all nodes, or let them share the run folder {str(folder)!r}"
            except AuthenticationError as error:
                if error.wrong_token and given and lost is None:
                    raise InputError(
                        f"node {place.number}: {error}: give all nodes of a run the same MESHWRIGHT_TOKEN, and each run a port of its own"
                    ) from None
                why = str(error)
            except (OSError, ValueError) as error:
                why = str(error)
        if now > said + STATUS_SECONDS:
            said = now
            note(
                f"node {place.number} has found no node that leads for {show_seconds(now - began)}: {why or 'none answers'}"
            )
        time.sleep(RETRY_SECONDS)
    failure = MeshwrightError if lost is None else Interrupted  # a run that has begun goes on with the same command
    raise failure(
        f"node {place.number} found no node that leads at {place.host}:{place.port} within {JOIN_SECONDS:.0f} s: {why}"
    )


SETTLE_SECONDS = 5.0
"""Seconds in which a launcher's request reaches the ranks one after the other, also where the launcher has to wait for
a core."""


@contextmanager
def stop_together(rank: int, early: str) -> Iterator[None]:
    """A request to stop ends what all ranks do inside, and rank 0 says so, once: `early` is when it came. Ranks hear of
    it one after the other, so that
    some lose a neighbour first."""
    asked: list[str] = []
    left = False

    def heard(number: int, _: Any) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) == 1 and not left:
            raise KeyboardInterrupt

    with stop_signal_handler(heard):
        try:
            yield
        except (KeyboardInterrupt, RuntimeError, TimeoutError, MeshwrightError):
            left = True
            if not asked:
                time.sleep(SETTLE_SECONDS)
            if not asked:
                raise
            atexit.register(_exit_process)
            if rank:
                raise SystemExit(Interrupted.exit_code) from None
            raise Interrupted(f"stopped by {asked[0]} {early}; the same command starts again") from None


def _exit_process() -> None:
    """The last thing that the process does: the library of an exchange that was cut off ends it with an error where its
    threads still wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.exit_code)
