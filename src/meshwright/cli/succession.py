"""Who leads a run on several machines when the node that led is gone: the first of the others, by number, that gets the lease of the run folder.

Rule: whoever leads holds the lease (train/lease.py), which the kernel or the file server frees when its holder dies, however it dies; so there are
never two leaders. It writes RUN/leader: its number and where it listens; the file goes when the run ends, in order or by an error that is said, and
stays when its writer is killed. A node that has lost its leader, whose ranks have ended with it,

1. ends too where RUN/leader is gone, or the run is not to be healed (`run.retries` 0);
2. leads when the lease is free and its turn has come: TURN seconds for each other node of a lower number;
3. else joins whoever leads, the same one as before or another, until ARRIVE seconds are over.

A first node that is started again while another one leads, or becomes the leader before it, joins that one; where it leads again itself, nodes that
have lost their leader come to it, and it waits for the others as long as for one that is lost. The new leader begins as any does: from the newest
checkpoint on disk, with a store and generations of its own; the copies of the lost node's ranks went with it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.base.files import write_whole

if TYPE_CHECKING:
    from meshwright.cli.nodes import Place

LEADER = "leader"
TURN = 1.0


class Leader(NamedTuple):
    """A node and where it listens for the others."""

    number: int
    host: str
    port: int


def leader_of(folder: Path) -> Leader | None:
    """Who leads the run in `folder`, or led it until it died; None where nobody does."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((folder / LEADER).read_text())
        return Leader(int(found["number"]), str(found["host"]), int(found["port"]))
    return None


@contextmanager
def announced(folder: Path, place: Place | None, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, the others find this node by RUN/leader, and the event log says who led before. Whoever enters holds the lease."""
    from meshwright.elastic.journal import Journal

    if place is None:
        yield
        return
    if place.after is not None:
        Journal(folder, note).write(kind="lost", node=str(place.after), cause="it led", decision=f"node {place.number} leads from here on")
    write_whole(folder / LEADER, json.dumps(Leader(place.number, place.host, place.port)._asdict()), private=True)
    try:
        yield
    finally:
        (folder / LEADER).unlink(missing_ok=True)


def is_led_by_another(place: Place, folder: Path) -> bool:
    """Whether a node of another number leads now."""
    from meshwright.train.lease import is_held

    leader = leader_of(folder)
    return leader is not None and leader.number != place.number and is_held(folder)


def is_overtaken(place: Place, folder: Path) -> bool:
    """The same once this node was refused the lease, by what the lease itself says: its holder may need long until it writes RUN/leader."""
    from meshwright.train.lease import holder_of, is_held

    end = time.monotonic() + TURN  # a moment lies between taking the lease and writing who has it
    while (holder := holder_of(folder)) is None and is_held(folder) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_held(folder) if holder is None else holder != place.number


def is_heir(place: Place, lost: Leader, folder: Path, waited: float) -> bool:
    """Whether this node is to lead after `lost`, which has been gone for `waited` seconds."""
    from meshwright.train.lease import is_held

    before = place.number - (lost.number < place.number)
    return waited >= TURN * before and not is_held(folder)
