"""The in-memory snapshots of the leader's machine, and those that it adopts from nodes whose leader was lost."""

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
    """The snapshots of the leader's machine: `shared` by the key of their set, the `server` that serves them to other
    nodes, and the `rounds` in which nodes replicate theirs.

    `put` passes an event to the loop of the leader, `tell` a message to a node. `job` identifies the run to nodes.
    """

    def __init__(
        self,
        outside: SystemInterface,
        host: str,
        token: str,
        locations: SnapshotLocations,
        put: Callable[[IpcMessage], None],
        tell: Callable[..., None],
    ) -> None:
        """Starts the server and the replicator."""
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
        """Registers the store to which the next ranks write."""
        self.shared = {key: stored for key, stored in self.shared.items() if stored.is_open} | {holdings.key: holdings}
        self.rounds.begin(holdings)

    def adopt(
        self, policy: AdoptionPolicy | None, inventories: Mapping[str, Any]
    ) -> tuple[AdoptedSnapshots | None, list[str]]:
        """Returns the newest complete set among those that this node has retained and those of other nodes, whose
        messages are in `inventories` by address, and why some are not adopted. Closes all other sets of this node."""
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
        own = retained.sets.pop(newest.key, None) if retained is not None and newest is not None else None
        if retained is not None:
            retained.close()
        if newest is None:
            return None, reasons
        holdings = own or self._outside.holdings(len(newest.places))
        holdings.key, self.shared[newest.key] = newest.key, holdings
        self._locations.adopt(newest.key, newest.places)
        return AdoptedSnapshots(newest.generation, holdings, False, 0.0), reasons

    def _open(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # these ranks no longer exist
            return self.shared[key].lend(rank)
        return None

    def close(self) -> None:
        """Closes the server and the replicator."""
        self.server.close()
        self.rounds.close()
