"""Manages the in-memory snapshots on the leader's machine, and adopts those of nodes whose leader was lost. The
leader's agent (cluster_agent.py) uses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.elastic.local_agent import SystemInterface
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_inventory import (
    AdoptedSnapshots,
    AdoptionPolicy,
    SnapshotInventory,
    newest_complete_version,
    read_inventory,
)
from meshwright.elastic.snapshot_replication import ReplicationCoordinator

MIRRORED_FIELDS = ("number", "whole", "seconds", "why")


class LeaderSnapshots:
    """The snapshots on the leader's machine. `shared`: the memory files, by the key of their set. `server`: serves them
    to other nodes. `rounds`: coordinates the replication between nodes. `job`: the digest that identifies job and run
    to nodes."""

    def __init__(
        self,
        outside: SystemInterface,
        host: str,
        token: str,
        locations: SnapshotLocations,
        put: Callable[[IpcMessage], None],
        tell: Callable[..., None],
    ) -> None:
        """Starts the server and the replicator. `put` passes an event to the loop of the leader, `tell` sends a message
        to a node. `locations`: the record of snapshot locations."""
        self.shared: dict[str, SharedFileStore] = {}
        self.job = ""
        self._outside, self._locations = outside, locations
        self.server = outside.lender(host, token, self._open, lambda line: put({"event": "degraded", "line": line}))
        locations.alive.add(self.server.address)
        mirror = outside.mirror(
            token, lambda *how: put(dict(zip(MIRRORED_FIELDS, how, strict=False), event="mirrored"))
        )
        self.rounds = ReplicationCoordinator(self.server.address, locations, mirror, tell, outside.clock)

    def hold(self, holdings: SharedFileStore) -> None:
        """Registers `holdings`, to which the next ranks write their snapshots."""
        self.shared = {key: stored for key, stored in self.shared.items() if stored.is_open} | {holdings.key: holdings}
        self.rounds.begin(holdings)

    def adopt(
        self, policy: AdoptionPolicy | None, inventories: Mapping[str, Any]
    ) -> tuple[AdoptedSnapshots | None, list[str]]:
        """Adopts the newest complete set of snapshots that this node and other nodes have retained. Returns it, or None
        if there is none, and the reasons why other snapshots are not adopted. `inventories`: the messages of other
        nodes, by address. All other sets of this node are closed."""
        if policy is None:
            return None, []
        self.job, retained = policy.job, policy.retained
        messages: dict[str, Any] = {self.server.address: retained.inventory()} if retained is not None else {}
        found: dict[str, SnapshotInventory] = {}
        reasons: list[str] = []
        messages |= inventories
        for address, message in messages.items():
            inventory, why = read_inventory(message, self.job)
            if inventory is not None:
                found[address] = inventory
            else:
                reasons.append(why)
        if found and not policy.adopts:
            found, reasons = {}, [Message("are not used, because of run.restart")]
        newest = newest_complete_version(found)
        if newest is None and any(found.values()):
            reasons.append(Message("are incomplete: those of some ranks are missing"))
        own = retained.sets.get(newest.key) if retained is not None and newest is not None else None
        # What may fail comes first, so that the caller can try again.
        holdings = own or (self._outside.holdings(len(newest.places)) if newest is not None else None)
        if retained is not None:
            if newest is not None:
                retained.sets.pop(newest.key, None)
            with contextlib.suppress(OSError):  # a file that cannot be closed must not cost the others
                retained.close()
        if newest is None or holdings is None:
            return None, reasons
        holdings.key, self.shared[newest.key] = newest.key, holdings
        self._locations.adopt(newest.key, newest.places)
        return AdoptedSnapshots(newest.generation, holdings, False, 0.0), reasons

    def _open(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # the snapshots of these ranks were closed
            return self.shared[key].lend(rank)
        return None

    def close(self) -> None:
        """Closes the server and the replicator."""
        self.server.close()
        self.rounds.close()
