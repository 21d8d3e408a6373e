"""`meshwright train` as one of several nodes: the first one leads, the others serve it. Each is started once, by whatever starts processes.

Rule: a process is a node, not a rank, when MESHWRIGHT_NODE is 1, or when as many processes were started as the cluster has nodes and these have several
devices each. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which node it is and where the first one is; so do Slurm's names.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.elastic.fleet import Fleet
    from meshwright.elastic.generation import Work
    from meshwright.intake.job import JobFile
    from meshwright.train.rank import Launched

NODE = "MESHWRIGHT_NODE"
ARRIVE = 300.0
"""Seconds that nodes get to come."""

AGAIN = 0.2
PORT = 29400


class Place(NamedTuple):
    """This node among all. `devices`: of each node that there may be, in order; `started`: how many were."""

    number: int
    started: int
    devices: tuple[int, ...]
    host: str
    port: int

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
def leading(place: Place, work: Work, note: Callable[[str], None], least: int) -> Iterator[Fleet]:
    """The ranks of all nodes as one nursery, once the nodes have come. They end as the block does."""
    from meshwright.base.errors import InputError, MeshwrightError
    from meshwright.base.link import TOKEN, token_of
    from meshwright.elastic.fleet import Fleet

    work.logs.mkdir(parents=True, exist_ok=True)
    os.environ[TOKEN] = token = token_of(os.environ, str(work.folder / "token"), write=True)
    host = socket.gethostbyname(place.host)
    try:
        fleet = Fleet(work.logs, work.warm, host, place.port, token, place.devices[0])
    except OSError as error:
        raise InputError(
            f"the first node cannot listen at {place.host}:{place.port} ({error.strerror}): set MASTER_ADDR and MASTER_PORT"
        ) from None
    code, line = 1, "the first node failed"
    try:
        _await(fleet, place, note, least)
        yield fleet
        code, line = 0, ""
    except MeshwrightError as error:
        code, line = error.exit_code, str(error).partition("\n")[0]
        raise
    finally:
        fleet.end(code, line)
        fleet.dissolve()
        (work.folder / "token").unlink(missing_ok=True)


def _await(fleet: Fleet, place: Place, note: Callable[[str], None], least: int) -> None:
    from meshwright.base.errors import MeshwrightError

    end, ready = time.monotonic() + ARRIVE, False
    note(f"node 0 of {place.started} at {fleet.host}:{place.port}, waiting for the others")
    while not ready or 1 + len(fleet.nodes) < place.started:
        for event in fleet.events(AGAIN):
            ready = ready or event["event"] == "ready"
            if event["event"] == "came":
                note(f"node {event['name']} has come")
        if time.monotonic() > end and ready:
            if least and fleet.places >= least:
                return
            raise MeshwrightError(
                f"{1 + len(fleet.nodes)} of {place.started} nodes came to {fleet.host}:{place.port} within {ARRIVE:.0f} s; "
                "start the same command on each, or let the run go on with fewer: --set run.least=RANKS"
            )


def serve(place: Place, file: JobFile, note: Callable[[str], None]) -> int:
    """Ranks of this node, as the first node says; its exit code when the run is over."""
    from meshwright.base.errors import Interrupted
    from meshwright.base.link import TOKEN, Link, address_towards
    from meshwright.cli.preparation import folder_of, source_of
    from meshwright.elastic.node import Node

    end, hello, token = _arrive(place, folder_of(file, source_of(file)).resolve())
    os.environ[TOKEN] = token
    own = address_towards(place.host, place.port)
    note(f"node {place.number} of {place.started} at {own}, led by {place.host}:{place.port}")
    code, line = Node(Link(end, hello), own, token, place.number, {"MESHWRIGHT_ADDRESS": own}).run()
    if not line and code:
        raise Interrupted(
            f"the first node, {place.host}:{place.port}, is gone: ranks of this node have ended; the same command joins again"
        )
    if line:
        note(f"meshwright: {line}")
    return code


def _arrive(place: Place, folder: Path) -> tuple[socket.socket, dict[str, object], str]:
    from meshwright.base.errors import MeshwrightError
    from meshwright.base.link import NotAdmitted, enter, token_of

    me = {"name": f"{place.number} ({socket.gethostname()})", "devices": place.devices[place.number], "order": place.number}
    give_up, why = time.monotonic() + ARRIVE, ""
    while time.monotonic() < give_up:
        token = token_of(os.environ, str(folder / "token"), write=False)
        try:
            if token:
                return *enter(place.host, place.port, token, me), token
            why = f"no token: set MESHWRIGHT_TOKEN on all nodes, or let them share the run folder {str(folder)!r}"
        except (OSError, ValueError, NotAdmitted) as error:
            why = str(error)
        time.sleep(AGAIN)
    raise MeshwrightError(f"node {place.number} found no first node at {place.host}:{place.port} within {ARRIVE:.0f} s: {why}")
