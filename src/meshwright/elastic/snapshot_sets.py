"""Owns the in-memory snapshots of a run: those of the current plan, and those of the previous plan while they are still
needed. It also owns the process that preserves both if the supervisor is killed.

Guarantees: the newest complete snapshots stay readable through any number of changes of the plan.
"""

from __future__ import annotations

from meshwright.core.messages import Message
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_adoption import SnapshotAdoption, last_step_of_run
from meshwright.elastic.snapshot_inventory import AdoptionPolicy
from meshwright.elastic.snapshot_locations import SnapshotLocations


class SnapshotSets:
    """The set `newest`, which the ranks write, and `old`, which they read until `newest` is complete.

    `locations` are the locations of snapshots in a run on several machines, or None if all snapshots are local.
    """

    def __init__(
        self, newest: SharedFileStore, adoption: SnapshotAdoption, locations: SnapshotLocations | None
    ) -> None:
        self.newest, self.adoption, self._locations = newest, adoption, locations
        self.old: SharedFileStore | None = None

    @property
    def source(self) -> SharedFileStore:
        """The set from which the next ranks restore."""
        return self.old or self.newest

    def adopt(self, work: RankJob, journal: EventLog) -> int | None:
        """Takes over the snapshots of a killed supervisor. Returns the generation of that supervisor, or None if there
        is nothing to adopt."""
        found = self.adoption.adopt(work, journal)
        if found is None:
            return None
        self.old, self.newest = found.sets(self.newest)
        return found.generation

    def adopt_from_nodes(self, agent: LocalAgent, policy: AdoptionPolicy | None, journal: EventLog) -> int | None:
        """Adopts the snapshots that nodes retained when their leader was lost, and records a fault. If something cannot
        be adopted, reports the reason. Returns the last generation of the lost leader; None if nothing is adopted."""
        found, reasons = agent.adopt(policy)
        for why in dict.fromkeys(reasons):
            journal.note(Message("the snapshots of a node that lost its leader {why}: not adopted", why=why))
        if found is None:
            return None
        journal.last = last_step_of_run(journal.folder)
        journal.fault(
            cause=Message("the node that led was lost"),
            decision=Message("its successor adopts the snapshots of the other nodes"),
            generation=found.generation,
        )
        self.old, self.newest = found.sets(self.newest)
        return found.generation

    def begin(self, generation: int, work: RankJob) -> None:
        """Prepares the files for the ranks of a generation, and passes them to the process that preserves them."""
        if self.old is not None and self.is_newest_usable():
            self._close_old()
        self.newest.begin()
        self.adoption.hold(generation, work, self.old, self.newest)

    def release_old(self, generation: int, work: RankJob) -> None:
        """Closes the snapshots of the previous plan once they are no longer needed."""
        self._close_old()
        self.adoption.hold(generation, work, self.old, self.newest)

    def is_old_obsolete(self) -> bool:
        """Whether the snapshots of the current plan are complete, and would survive the loss of a node if those of the
        previous plan would."""
        if self.old is None or not self.newest.snapshot_step:
            return False
        return self._locations is None or self._locations.is_safe(self.newest.key)

    def is_newest_usable(self) -> bool:
        """Whether the next ranks can resume from snapshots of the current plan although those of the previous plan
        still exist."""
        return self._locations is not None and self._locations.has(self.newest.key)

    def change(self, fresh: SharedFileStore) -> None:
        """Makes `fresh` the set that the next ranks write. The newest complete snapshots stay readable."""
        if self.old is not None:
            left, self.newest = (self.old, self.newest) if self.is_newest_usable() else (self.newest, self.old)
            left.close()
        self.old, self.newest = self.newest, fresh

    def _close_old(self) -> None:
        if self.old is not None:
            self.old.close()
        self.old = None

    def close(self) -> None:
        """Closes everything after the end of the run."""
        self.adoption.close()
        self.newest.close()
        self._close_old()
