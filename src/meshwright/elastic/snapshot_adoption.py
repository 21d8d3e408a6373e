"""Preserves the state of a supervisor (generation number and in-memory snapshots) after it was killed. The next
supervisor of the run, its replacement, uses this module to adopt the state.

Guarantees of `SnapshotAdoption`:
- When a supervisor is killed, its ranks end. A separate process, the FD store (snapshot_fd_store.py), keeps the
  snapshots open for `AdoptionPolicy.seconds`. If the same command is started on the same machine within this time, it
  adopts the snapshots.
- The replacement resumes from the newest step for which every rank has a complete snapshot. An incomplete snapshot has
  no step number, and ranks check the digest of a snapshot before they use it (core/snapshots.py).
- Snapshots are not adopted if they belong to another job or version of Meshwright, or if a process of the killed
  supervisor is still alive. Then a line reports the reason, and the run resumes from its checkpoint on disk.
- The lock of the run folder admits one replacement at a time. The FD store retains the snapshots until the FD store of
  the replacement has opened them. So nothing is lost if the replacement is also killed.

The file `holder` in the run folder contains the random name of the FD store's socket. Only the owner of the run can
read this file. A normal end of the run removes it.

[Note: other plans] Snapshots can be restored under any plan. If the replacement runs an identical job, its ranks write
their snapshots to the adopted memory. For another job they write to new memory, and the adopted memory is freed when
the new snapshots are complete.

`SnapshotSets` owns the in-memory snapshots of a run, as sets: a set has the snapshots of all ranks under one plan. It
has the set of the current plan, and that of the previous plan while it is needed. Guarantee: the newest complete
snapshots stay readable through any number of changes of the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, CallPending
from meshwright.core.ipc import IpcMessage, parse_message, wait_readable
from meshwright.core.messages import Message
from meshwright.core.storage_deadline import read_tail, unanswered
from meshwright.core.version import __version__
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_fd_store import ADOPTED_REPLY, is_same_user, open_snapshot_file, peer_credentials
from meshwright.elastic.snapshot_inventory import AdoptedSnapshots, AdoptionPolicy
from meshwright.spec.record import RECORD_TAIL_BYTES, RECORDS_FILE_NAME, last_recorded_step

SOCKET_NAME_FILE = "holder"
FD_STORE_MODULE = "meshwright.elastic.snapshot_fd_store"
SNAPSHOT_LIFETIME_SECONDS = 60.0
"""The snapshots of a killed supervisor are available to a replacement for this time."""

TERMINATION_SECONDS = 10.0
"""A replacement waits for this time until the processes of a killed supervisor have ended."""

STARTUP_SECONDS = 10.0
"""An FD store must open the snapshots within this time. It is also the minimum time between two starts of an FD store.
"""

MAX_STATE_BYTES = 1 << 24
"""The maximum size of the state that an FD store sends."""


def json_digest(*parts: Any) -> str:
    """Returns a digest of the JSON values `parts`."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def last_step_of_run(folder: Path) -> int:
    """Returns the last step in the records of a run folder, or 0 if no records can be read in time."""
    try:
        return max(0, last_recorded_step(read_tail(folder / RECORDS_FILE_NAME, RECORD_TAIL_BYTES)))
    except OSError:
        return 0


class SnapshotAdoption:
    """Adopts the in-memory snapshots of a killed supervisor, and preserves those of this supervisor in an FD store.
    Without `hold` it does neither: the snapshots are lost when this supervisor ends."""

    def __init__(self, folder: Path, hold: AdoptionPolicy | None, note: Callable[[str], None]) -> None:
        """Creates the lifeline pipe (snapshot_fd_store.py) if `hold` is set and the system is Linux. `folder`: the run
        folder. `note` receives lines for the user."""
        self.folder, self.note = folder, note
        self._hold = hold if sys.platform.startswith("linux") and hasattr(os, "memfd_create") else None
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""
        self._started = 0.0
        self._reading = -1
        self.lifeline: int | None = None
        self._before: socket.socket | None = None
        """The connection to the FD store of the killed supervisor. It stays open until this supervisor's FD store has
        the snapshots."""
        self._is_named = self._is_reported = False
        self._path = folder / SOCKET_NAME_FILE
        self._disk = BackgroundCall[None]("write holder")
        self._name = self._written = ""
        """The name of the socket of the FD store, and the name that was last written to the run folder."""
        if self._hold is not None:
            self._reading, self.lifeline = os.pipe()

    # --- snapshots of a killed supervisor

    def adopt(self, work: RankJob, journal: EventLog) -> AdoptedSnapshots | None:
        """Returns the state of the killed supervisor and records a fault in `journal`. Returns None if there is no such
        state. If the state cannot be adopted, it also returns None, and the user gets a line with the reason. `work`:
        the job of this supervisor."""
        if self._hold is None:
            # After this run, the preserved snapshots would be outdated, so no later supervisor may adopt them.
            self._disk.attempt(self._remove_name)
            return None
        end = self._reached()
        if end is None:
            return None
        try:
            found, why = self._read(end, work, self._hold)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found, why = None, Message("cannot be read ({name}: {error})", name=type(error).__name__, error=error)
        if found is None:
            self.note(Message("the snapshots of the killed supervisor {why}: not adopted", why=why))
            with contextlib.suppress(OSError):
                end.sendall(ADOPTED_REPLY)
            end.close()
            return None
        self._before, journal.last = end, last_step_of_run(self.folder)
        place = {**found.holdings.place(0), "rank": None, "generation": found.generation, "detection": found.seconds}
        journal.fault(
            cause=Message("the supervisor was killed"),
            decision=Message("a new supervisor adopts its snapshots"),
            **place,
        )
        return found

    def _reached(self) -> socket.socket | None:
        try:
            with storage.report_if_overdue(lambda: self._tell(unanswered(self._path))):
                name = storage.read_file(self._path, most=200).decode().strip()
        except (OSError, ValueError):
            return None
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(TERMINATION_SECONDS)
            end.connect(f"\0{name}")
        except (OSError, ValueError):  # without a running FD store, there is nothing to adopt
            end.close()
            return None
        return end

    def _read(self, end: socket.socket, work: RankJob, hold: AdoptionPolicy) -> tuple[AdoptedSnapshots | None, str]:
        """Reads the state from the FD store at the other end of the socket `end`. Returns the adopted snapshots and '',
        or None and the reason why they are not adopted."""
        if not is_same_user(end):
            return None, Message("belong to another user")
        if not hold.adopts:
            return None, Message("are not used, because of run.restart")
        try:
            with end.makefile("rb") as lines:
                line = lines.readline(MAX_STATE_BYTES)
        except ConnectionResetError:
            line = b""
        except TimeoutError:
            return None, Message(
                "may still be written: not all of its processes have ended within {termination_seconds:.0f} s",
                termination_seconds=TERMINATION_SECONDS,
            )
        if not line:
            return None, Message("were adopted by another process")
        state = parse_message(line)
        if state["version"] != __version__:
            return None, Message(
                "are of version {version}, but this is version {version_2}",
                version=state["version"],
                version_2=__version__,
            )
        if state["job"] != hold.job:
            return None, Message("belong to another job")
        process = peer_credentials(end)[0]
        holdings = None
        for each in reversed(state["sets"]):  # the newer set is usable only if all ranks have a snapshot in it
            holdings = _open_adopted_files(process, each)
            if holdings.snapshot_step or each is state["sets"][0]:
                break
            holdings.close()
        assert holdings is not None, "a state without a set"
        holdings.written(0.0)
        return AdoptedSnapshots(
            int(state["generation"]), holdings, state["work"] == _rank_job_digest(work), float(state["killed"])
        ), ""

    # --- snapshots of this supervisor

    def hold(self, generation: int, work: RankJob, old: SharedFileStore | None, newest: SharedFileStore) -> None:
        """Sends the FD store the state that a replacement would adopt: the generation, the job and the sets of
        snapshots. It is called before each start of the ranks, and when the set `old` is no longer needed."""
        sets = [newest] if old is None else [old, newest]
        if self._hold is None or not all(each.is_open for each in sets):
            return
        known = [{"key": each.key, "world": each.world, "files": each.all_files()} for each in sets]
        state = {
            "version": __version__,
            "job": self._hold.job,
            "work": _rank_job_digest(work),
            "generation": generation,
            "sets": known,
        }
        self._line = json.dumps(state, separators=(",", ":")).encode() + b"\n"
        if self._process is None or not self._send(self._process):
            self._begin(self._hold)

    def look(self) -> None:
        """Starts a new FD store if the current one has died, or if its socket name could not be written. The supervisor
        calls it several times a second."""
        if self._hold is None or not self._line:
            return
        if self._disk.is_pending:
            self._write_name()
        elif time.monotonic() < self._started + STARTUP_SECONDS:
            return
        elif not self._is_named or self._process is None or self._process.poll() is not None:
            self._begin(self._hold)

    def _tell(self, error: OSError) -> None:
        if not self._is_reported:
            self._is_reported = True
            self.note(
                Message(
                    "if this process is killed, the snapshots are lost, and with them the steps since the last "
                    "checkpoint: {error}",
                    error=error,
                )
            )

    def _begin(self, hold: AdoptionPolicy) -> None:
        """Starts an FD store, then releases that of the killed supervisor. If the system cannot start a process, the
        run continues without an FD store."""
        self._end()
        self._started, self._is_named = time.monotonic(), False
        self._name = f"meshwright-{secrets.token_hex(16)}"
        words = [sys.executable, "-m", FD_STORE_MODULE, self._name, str(hold.seconds), str(self._reading)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            process = self._process = subprocess.Popen(
                words, **pipes, bufsize=0, start_new_session=True, pass_fds=(self._reading,)
            )  # type: ignore[call-overload]
            os.set_blocking(process.stdin.fileno(), False)
            if not self._send(process):
                raise BlockingIOError("the process that holds them does not read")
            if self._before is not None:
                wait_readable(STARTUP_SECONDS, process.stdout.fileno())
            if not self._disk.is_pending:  # otherwise `look` starts another FD store when the disk answers
                self._write_name()
        except OSError as error:
            self._tell(error)
        self._release()

    def _write_name(self) -> None:
        """Writes the name of the socket to the run folder, or continues to wait for a pending write. The user gets a
        line if the disk does not answer."""
        write = partial(storage.replace_file, self._path, self._name + "\n", private=True)
        if not self._disk.is_pending:
            self._written = self._name
        try:
            self._disk.call(write)
            self._is_named = self._written == self._name
        except OSError as error:
            self._tell(error)
        except CallPending as pending:
            if pending.seconds >= storage.OVERDUE_SECONDS:
                self._tell(unanswered(self._path))

    def _remove_name(self) -> None:
        storage.remove_if_possible(self._path)

    def _send(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            return process.stdin.write(self._line) == len(self._line)
        return False

    def _release(self) -> None:
        """Ends the FD store of the killed supervisor, which is no longer needed."""
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._before.sendall(ADOPTED_REPLY)
            self._before.close()
            self._before = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def close(self) -> None:
        """Ends the FD store of this supervisor, since nothing is adopted after the end of a run. If this supervisor has
        not taken over the snapshots of a killed one, the FD store of the latter continues."""
        self._end()
        if self._is_named:
            self._is_named = False
            self._disk.attempt(self._remove_name, time.monotonic() + storage.OVERDUE_SECONDS)
        if self._before is not None:
            self._before.close()
            self._before = None
        if self.lifeline is not None:
            os.close(self.lifeline)
            os.close(self._reading)
            self.lifeline = None


def _rank_job_digest(work: RankJob) -> str:
    return json_digest(work.target, work.world, work.payload)


def _open_adopted_files(process: int, each: IpcMessage) -> SharedFileStore:
    """Opens a set of snapshots. `process`: the FD store. `each`: the set in its state, with descriptor numbers of this
    process. Raises OSError if a file cannot be opened."""
    files: list[int] = []
    try:
        for file in each["files"]:
            files.append(open_snapshot_file(f"/proc/{process}/fd/{int(file)}", each["key"]))
    except OSError:
        for opened in files:
            os.close(opened)
        raise
    return SharedFileStore(int(each["world"]), (each["key"], files))


class SnapshotSets:
    """The sets of snapshots of a run. `newest`: the set that the current ranks write. `old`: the set from which they
    have resumed, until `newest` is complete; else None. `locations`: the record of snapshot locations in a run on
    several machines, else None."""

    def __init__(
        self, newest: SharedFileStore, adoption: SnapshotAdoption, locations: SnapshotLocations | None
    ) -> None:
        self.newest, self.adoption, self._locations = newest, adoption, locations
        self.old: SharedFileStore | None = None

    @property
    def source(self) -> SharedFileStore:
        """Returns the set from which the next ranks resume."""
        return self.old or self.newest

    def adopt(self, work: RankJob, journal: EventLog) -> int | None:
        """Adopts the snapshots of a killed supervisor. Returns its last generation, or None if nothing is adopted.
        Arguments as for `SnapshotAdoption.adopt`."""
        found = self.adoption.adopt(work, journal)
        if found is None:
            return None
        self.old, self.newest = found.sets(self.newest)
        return found.generation

    def adopt_from_nodes(self, agent: LocalAgent, policy: AdoptionPolicy | None, journal: EventLog) -> int | None:
        """Adopts the snapshots that nodes have retained from a lost leader, and records a fault. The user gets a line
        for each reason why snapshots are not adopted. Returns the last generation of the lost leader, or None if
        nothing is adopted."""
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
        """Prepares the sets for the ranks of a generation, and passes them to the FD store."""
        if self.old is not None and self.is_newest_usable():
            self._close_old()
        self.newest.begin()
        self.adoption.hold(generation, work, self.old, self.newest)

    def release_old(self, generation: int, work: RankJob) -> None:
        """Closes the set `old` and informs the FD store."""
        self._close_old()
        self.adoption.hold(generation, work, self.old, self.newest)

    def is_old_obsolete(self) -> bool:
        """Returns whether `old` is no longer needed: all ranks have a snapshot in `newest`. If these are on several
        nodes, they must also have replicas."""
        if self.old is None or not self.newest.snapshot_step:
            return False
        return self._locations is None or self._locations.is_safe(self.newest.key)

    def is_newest_usable(self) -> bool:
        """Returns whether the next ranks of a run on several machines can resume from `newest`, although `old` still
        exists."""
        return self._locations is not None and self._locations.has(self.newest.key)

    def change(self, fresh: SharedFileStore) -> None:
        """Makes `fresh` the set that the next ranks write. The set with the newest complete snapshots becomes `old`."""
        if self.old is not None:
            left, self.newest = (self.old, self.newest) if self.is_newest_usable() else (self.newest, self.old)
            left.close()
        self.old, self.newest = self.newest, fresh

    def _close_old(self) -> None:
        if self.old is not None:
            self.old.close()
        self.old = None

    def close(self) -> None:
        """Closes both sets and ends the FD store, after the end of the run."""
        self.adoption.close()
        self.newest.close()
        self._close_old()
