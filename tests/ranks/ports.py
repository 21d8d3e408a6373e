"""A port of the loopback for processes that are yet to listen there: nobody else is given it meanwhile."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reserved(among: Sequence[int] = (0,)) -> Iterator[int]:
    """A port that is bound and does not listen: the system gives it to no connection and to nobody who asks for any
    port, and whoever listens
    there with SO_REUSEADDR, as torch's store and the doors of nodes do, may. `among`: those to choose from; 0: any."""
    with socket.socket() as held:
        for port in random.sample(among, len(among)):
            try:
                held.bind(("127.0.0.1", port))
                break
            except OSError:
                continue
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # after it was bound, so that two that reserve never have the same
        yield held.getsockname()[1]


def connected(pid: int, port: int) -> bool:
    """Whether the process has a connection to the port where ranks meet; the system lists one to an old address by the
    new family too."""
    try:
        tables = [Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    except OSError:
        return False
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
