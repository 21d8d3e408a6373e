"""`meshwright train` as one of several nodes: the first one leads (succession.py: or the one after it), the others serve it. Each is started once,
by whatever starts processes.

Rule: a process is a node, not a rank, when MESHWRIGHT_NODE is 1, or when as many processes were started as the cluster has nodes and these have several
devices each. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which node it is and where the first one is; so do Slurm's names.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.base.units import show_seconds

if TYPE_CHECKING:
    from meshwright.cli.succession import Leader
    from meshwright.elastic.fleet import Fleet
    from meshwright.elastic.generation import Work
    from meshwright.elastic.nursery import Nursery
    from meshwright.intake.job import JobFile
    from meshwright.spec.run import Run
    from meshwright.train.rank import Launched

NODE = "MESHWRIGHT_NODE"
ARRIVE = 300.0
"""Seconds that nodes get to come."""

AGAIN = 0.2

EVERY = 5.0
"""Seconds between lines about a node that leads and is not found."""

PORT = 29400


class Place(NamedTuple):
    """This node among all. `devices`: of each node that there may be, in order; `started`: how many were. `host` and `port`: of the one that leads;
    `after`: the number of the one that led before, which is gone; `warm`: the process that forked ranks here under that one; `token`: that one's."""

    number: int
    started: int
    devices: tuple[int, ...]
    host: str
    port: int
    after: int | None = None
    warm: Nursery | None = None
    token: str = ""

    @property
    def world(self) -> int:
        return sum(self.devices)


def place_of(me: Launched, job: Callable[[], JobFile], environment: Mapping[str, str]) -> Place | None:
    """The node that this process is; None when it is a rank. `job` is read where it matters."""
    from meshwright.base.errors import InputError
    from meshwright.intake.job import cluster_from

    asked = environment.get(NODE) == "1"
    if not asked and int(environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_NTASKS_PER_NODE", 1))) > 1:
        return None
    file = job()
    cluster = cluster_from(file.cluster)
    if cluster.name.startswith("local"):
        devices = [cluster.devices] * me.world
    else:
        devices = [group.devices for group in cluster.groups for _ in range(group.nodes)]
        fewer = me.world < len(devices) and file.run.least
        if asked and len(devices) != me.world and not fewer:
            raise InputError(
                f"{NODE}: {me.world} nodes were started and cluster {cluster.name!r} has {len(devices)}: start one process on each, or let "
                "the run go on with fewer: --set run.least=RANKS"
            )
        asked = asked or (len(devices) == me.world != cluster.devices)
    if not asked or me.world == 1:
        return None
    port = int(environment.get("MASTER_PORT", PORT)) + ("TORCHELASTIC_RUN_ID" in environment)  # torchrun's own store has that one
    return Place(me.rank, me.world, tuple(devices), environment["MASTER_ADDR"], port)


def told(file: JobFile, place: Place) -> str | None:
    """The cluster of one node in words, where it was left to this machine how many devices it has."""
    return f"local:{place.devices[0]}" if file.cluster.name == "local" and not file.cluster.path and not file.cluster.groups else None


@contextmanager
def leading(place: Place, work: Work, note: Callable[[str], None], run: Run) -> Iterator[Fleet]:
    """The ranks of all nodes as one nursery, once the nodes have come. They end as the block does."""
    from meshwright.base.errors import InputError, MeshwrightError
    from meshwright.base.files import write_whole
    from meshwright.base.link import TOKEN
    from meshwright.elastic.fleet import Fleet

    work.logs.mkdir(parents=True, exist_ok=True)
    token = os.environ.get(TOKEN) or place.token or secrets.token_hex(32)
    if TOKEN not in os.environ:
        write_whole(work.folder / "token", token, private=True)  # also one that others know: what a dead leader wrote may be another
    host = socket.gethostbyname(place.host)
    try:
        fleet = Fleet(work.logs, work.warm, host, place.port, token, place.devices[place.number], place.warm)
    except OSError as error:
        raise InputError(
            f"the node that leads cannot listen at {place.host}:{place.port} ({error.strerror}): set MASTER_ADDR and MASTER_PORT"
        ) from None
    code, line = 1, "the node that leads failed"
    try:
        _await(fleet, place, note, run)
        yield fleet
        code, line = 0, ""
    except MeshwrightError as error:
        code, line = error.exit_code, str(error).partition("\n")[0]
        raise
    finally:
        fleet.end(code, line)
        fleet.dissolve()
        (work.folder / "token").unlink(missing_ok=True)


def goes_on(fleet: Fleet, place: Place) -> bool:
    """Whether the run of a leader that is gone goes on here: this node follows that one, or another one that has come has lost it."""
    return place.after is not None or any(node.link.hello.get("lost") for node in fleet.nodes)


def _await(fleet: Fleet, place: Place, note: Callable[[str], None], run: Run) -> None:
    """Until all nodes have come; where some of them have lost their leader the others get as long as one that comes back."""
    from meshwright.base.errors import MeshwrightError

    heir, began, ready = place.after is not None, fleet.outside.clock(), False
    is_later, patience = heir, run.rejoin if heir else ARRIVE
    if heir:
        note(
            f"node {place.number} of {place.started} at {fleet.host}:{place.port}, leads in the place of node {place.after}, waiting for the others"
        )
    else:
        note(f"node {place.number} of {place.started} at {fleet.host}:{place.port}, waiting for the others")
    while not ready or 1 + len(fleet.nodes) < place.started - heir:
        for event in fleet.events(AGAIN):
            ready = ready or event["event"] == "ready"
            if event["event"] == "came":
                note(f"node {event['name']} has come")
            elif event["event"] == "refusal":
                note(event["line"])
        waited = fleet.outside.clock() - began
        if not is_later and goes_on(fleet, place):
            is_later, patience = True, waited + run.rejoin
        if waited > patience and ready:
            if (run.least or is_later) and len(fleet.slots) >= run.least:
                return
            raise MeshwrightError(
                f"{1 + len(fleet.nodes)} of {place.started} nodes came to {fleet.host}:{place.port} within {patience:.0f} s; "
                "start the same command on each, or let the run go on with fewer: --set run.least=RANKS"
            )


def serve(place: Place, file: JobFile, note: Callable[[str], None], lost: Leader | None = None) -> int | Place:
    """Ranks of this node, as the node that leads says; its exit code when the run is over, or the place from which this node is to lead (succession.py).
    `lost`: the leader that it knows, where it has had one."""
    from meshwright.base.errors import Interrupted
    from meshwright.base.link import TOKEN, Link, address_towards
    from meshwright.cli.preparation import folder_of, source_of
    from meshwright.cli.succession import leader_of
    from meshwright.elastic.node import Node

    folder, own, warm, token = folder_of(file, source_of(file)).resolve(), place.host, place.warm, place.token
    while True:
        came = _arrive(place, folder, lost, os.environ.get(TOKEN, ""), note)
        if came is None:
            assert lost is not None
            return place._replace(host=own, after=lost.number, warm=warm, token=token)
        end, hello, token, at = came
        own = address_towards(*at)
        note(f"node {place.number} of {place.started} at {own}, led by {at[0]}:{at[1]}")
        node = Node(Link(end, hello), own, token, place.number, {"MESHWRIGHT_ADDRESS": own, TOKEN: token}, warm)
        code, line = node.run()
        warm = None if node.nursery.ended else node.nursery
        if line:
            note(f"meshwright: {line}")
        lost = leader_of(folder) if code and not line and not node.leaving and file.run.retries else None
        if lost is None and code and not line:
            raise Interrupted(f"the node that led, {at[0]}:{at[1]}, is gone: ranks of this node have ended; the same command joins again")
        if lost is None:
            return code
        note(f"the node that led, {at[0]}:{at[1]}, is gone: ranks of this node have ended; it waits for one that leads, or leads itself")


def _arrive(
    place: Place, folder: Path, lost: Leader | None, given: str, note: Callable[[str], None] = lambda line: None
) -> tuple[socket.socket, dict[str, object], str, tuple[str, int]] | None:
    """The connection to the node that leads, what that says, the token, and its address; None where this node is to lead, `lost` being
    gone. `given`: the token, where whoever started this process gave it one; else whoever leads writes one.

    Raises: InputError at once where the token that was given is refused; MeshwrightError or Interrupted when no node leads within ARRIVE seconds.
    """
    from meshwright.base.errors import InputError, Interrupted, MeshwrightError
    from meshwright.base.link import NotAdmitted, enter, token_of
    from meshwright.cli.succession import is_heir, leader_of

    name, devices = f"{place.number} ({socket.gethostname()})", place.devices[place.number]
    me = {"name": name, "devices": devices, "order": place.number, "lost": lost is not None}
    began, why, said = time.monotonic(), "", time.monotonic()
    while (now := time.monotonic()) < began + ARRIVE:
        token, leader = given or token_of(folder / "token"), leader_of(folder)
        if lost is not None and leader is None:
            raise Interrupted("the run has ended without this node; the same command joins it again")
        if lost is not None and leader == lost and is_heir(place, lost, folder, now - began):
            return None
        for at in dict.fromkeys([*([(leader.host, leader.port)] if leader else []), *([(place.host, place.port)] if lost is None else [])]):
            try:
                if token:
                    return *enter(*at, token, me), token, at
                why = f"no token: set MESHWRIGHT_TOKEN on all nodes, or let them share the run folder {str(folder)!r}"
            except NotAdmitted as error:
                if error.wrong_token and given and lost is None:
                    raise InputError(
                        f"node {place.number}: {error}: give all nodes of a run the same MESHWRIGHT_TOKEN, and each run a port of its own"
                    ) from None
                why = str(error)
            except (OSError, ValueError) as error:
                why = str(error)
        if now > said + EVERY:
            said = now
            note(f"node {place.number} has found no node that leads for {show_seconds(now - began)}: {why or 'none answers'}")
        time.sleep(AGAIN)
    failure = MeshwrightError if lost is None else Interrupted  # a run that has begun goes on with the same command
    raise failure(f"node {place.number} found no node that leads at {place.host}:{place.port} within {ARRIVE:.0f} s: {why}")
