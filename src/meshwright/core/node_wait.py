"""Defines the limits and the texts of a wait for nodes. A leader uses them before it starts ranks (cli/leader_role.py)
and between two generations (elastic/missing_nodes.py)."""

from __future__ import annotations

from meshwright.core.errors import Interrupted
from meshwright.core.messages import Message

JOIN_SECONDS = 300.0
"""Seconds within which nodes must join a leader, and within which a node must find a leader."""

WAIT_NOTE_SECONDS = 60.0
"""The time between two lines about missing nodes."""


def waiting_line(places: int, world: int, min_ranks: int, waited: float, limit: float) -> Message:
    """Returns the status line of a run that waits for nodes. `places`: the number of ranks for which it has devices, of
    `world`. `waited`, `limit`: seconds."""
    return Message(
        "the nodes have had room for {places} of {world} ranks for {waited:seconds}: waiting until there is room for "
        "{least} (run.min_ranks), for at most {limit:seconds} in all",
        places=places,
        world=world,
        waited=waited,
        least=min_ranks or world,
        limit=limit,
    )


def too_few_nodes(places: int, min_ranks: int) -> Message:
    """Returns why a run that waited for nodes ends."""
    return Message(
        "too few nodes (room for {places} ranks, run.min_ranks is {min_ranks})", places=places, min_ranks=min_ranks
    )


def ended_without_save(reason: str) -> Interrupted:
    """Returns the error that ends a run which cannot start ranks to save their states."""
    return Interrupted(
        Message("{reason}: the same command goes on from the last checkpoint when there are more", reason=reason)
    )
