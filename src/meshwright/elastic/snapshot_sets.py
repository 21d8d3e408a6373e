"""Owns the in-memory snapshots of a run: those that the ranks write, those of the previous plan while they are still
needed, and the process that preserves both when the supervisor is killed.

Guarantees: the newest complete snapshots stay readable through any number of changes of the plan.
"""

from __future__ import annotations

from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_adoption import SnapshotAdoption
from meshwright.elastic.snapshot_locations import SnapshotLocations


class SnapshotSets:
    """The set `newest`, which the ranks write, and `old`, which they read until `newest` is complete.

    `locations` says where snapshots are in a run on several machines; None when all of them are local.
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
        """Takes over the snapshots of a killed supervisor. Returns its generation; None if there is nothing to
        adopt."""
        found = self.adoption.adopt(work, journal)
        if found is None:
            return None
        self.old, self.newest = found.sets(self.newest)
        return found.generation

    def begin(self, generation: int, work: RankJob) -> None:
        """Prepares the files for the ranks of a generation, and has them preserved."""
        if self.old is not None and self.is_newest_usable():
            self._close_old()
        self.newest.begin()
        self.adoption.hold(generation, work, self.old, self.newest)

    def release_old(self, generation: int, work: RankJob) -> None:
        """Closes the snapshots of the previous plan once nobody needs them."""
        self._close_old()
        self.adoption.hold(generation, work, self.old, self.newest)

    def is_old_obsolete(self) -> bool:
        """Whether the snapshots of the current plan are complete, and survive the loss of a node as those of the
        previous plan do."""
        if self.old is None or not self.newest.snapshot_step:
            return False
        return self._locations is None or self._locations.is_safe(self.newest.key)

    def is_newest_usable(self) -> bool:
        """Whether the next ranks can resume from snapshots of the current plan, while those of the previous plan still
        exist."""
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
        """Closes everything: the run has ended."""
        self.adoption.close()
        self.newest.close()
        self._close_old()
