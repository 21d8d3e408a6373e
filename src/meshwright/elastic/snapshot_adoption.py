"""What a supervisor must hold across its own death, and how a replacement adopts it: the number of the generation and
the in-memory snapshots.

Guarantees: when a supervisor is killed, its ranks end with it and its snapshots stay for `AdoptionPolicy.seconds` in a
process of its own (holder.py). The same command
on the same machine adopts them within that time and goes on from the newest step of which every rank has a whole
snapshot: what was half written has no step, and the
ranks compare digests before they read (core/snapshots.py). Nothing is adopted of another job or version of Meshwright,
nor while a process of the killed supervisor
still lives: a line says so, and the run goes on from its checkpoint. The lease of the run folder admits one replacement
at a time; until it holds
the snapshots itself they stay where they are, so that it may be killed as well.

RUN/holder, readable by its owner alone, has the random name of the socket. It goes with an ordinary end of the run.

[Note: other plans] Snapshots are read whatever their layout, as after a change of the number of ranks. Where the
replacement runs the very same work its ranks
keep their snapshots in the same memory; else in new memory, and the adopted one stays until the new one is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from meshwright.core import storage
from meshwright.core.files import write_atomically
from meshwright.core.ipc import IpcMessage, parse_message
from meshwright.core.version import __version__
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_fd_store import ADOPTED_REPLY, is_same_user, open_snapshot_file, peer_credentials
from meshwright.spec.record import RECORD_TAIL_BYTES, RECORDS_FILE_NAME, last_recorded_step

SOCKET_NAME_FILE = "holder"
FD_STORE_MODULE = "meshwright.elastic.snapshot_fd_store"
SNAPSHOT_LIFETIME_SECONDS = 60.0
"""Seconds for which the snapshots of a killed supervisor wait for a replacement."""

TERMINATION_SECONDS = 10.0
"""Seconds that the processes of a killed supervisor get to end."""

STARTUP_SECONDS = 10.0
"""Seconds that a holder gets to open the snapshots, and that pass at least before one that has died is started
again."""

MAX_STATE_BYTES = 1 << 24
"""Bytes of a state."""


class AdoptionPolicy(NamedTuple):
    """`seconds` for which snapshots outlive a killed supervisor, and a digest of the `job` that they are of; `adopts`:
    whether this run goes on from those of a
    killed one."""

    seconds: float
    job: str
    adopts: bool = True


class AdoptedSnapshots(NamedTuple):
    """What a killed supervisor left: its generation, one set of snapshots, whether the work is the `same`, and the
    seconds since it was killed."""

    generation: int
    holdings: SharedFileStore
    same: bool
    seconds: float

    def sets(self, fresh: SharedFileStore) -> tuple[SharedFileStore | None, SharedFileStore]:
        """The set that the next generation reads, where it is another one, and the set that it writes: `fresh`, which
        is closed where it is of no use."""
        if not self.same:
            return self.holdings, fresh
        fresh.close()
        return None, self.holdings


def json_digest(*parts: Any) -> str:
    """A digest of what JSON can say."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def last_step_of_run(folder: Path) -> int:
    """The last step in the records of a run folder; 0 where there is none, or nobody can tell."""
    try:
        return max(0, last_recorded_step(storage.read_file(folder / RECORDS_FILE_NAME, -RECORD_TAIL_BYTES, links=True)))
    except OSError:
        return 0


class SnapshotAdoption:
    """The supervisor's side. `hold` None: its snapshots end with it, and it adopts none."""

    def __init__(self, folder: Path, hold: AdoptionPolicy | None, note: Callable[[str], None]) -> None:
        self.folder, self.note = folder, note
        self._hold = hold if sys.platform.startswith("linux") and hasattr(os, "memfd_create") else None
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""
        self._started = 0.0
        self._reading = -1
        self.lifeline: int | None = None
        self._before: socket.socket | None = None
        """The connection to the holder of the supervisor before this one, until this one's holds the snapshots."""
        self._is_named = self._is_told = False
        if self._hold is not None:
            self._reading, self.lifeline = os.pipe()

    # --- of the supervisor before
    # -----------------------------------------------------------------------------------------

    def adopt(self, work: RankJob, journal: EventLog) -> AdoptedSnapshots | None:
        """What the supervisor before left, if it was killed a moment ago; it counts as a fault. Says why where it left
        something that cannot be adopted."""
        if self._hold is None:
            with contextlib.suppress(OSError):  # steps that this run makes are not known to what is held there
                (self.folder / SOCKET_NAME_FILE).unlink(missing_ok=True)
            return None
        end = self._reached()
        if end is None:
            return None
        try:
            found, why = self._read(end, work, self._hold)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found, why = None, f"cannot be read ({type(error).__name__}: {error})"
        if found is None:
            self.note(f"the snapshots of the killed supervisor {why}: not adopted")
            with contextlib.suppress(OSError):
                end.sendall(ADOPTED_REPLY)
            end.close()
            return None
        self._before, journal.last = end, last_step_of_run(self.folder)
        place = {**found.holdings.place(0), "rank": None, "generation": found.generation, "detection": found.seconds}
        journal.fault(cause="the supervisor was killed", decision="another one adopts its snapshots", **place)
        return found

    def _reached(self) -> socket.socket | None:
        try:
            name = storage.read_file(self.folder / SOCKET_NAME_FILE, most=200).decode().strip()
        except (OSError, ValueError):
            return None
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(TERMINATION_SECONDS)
            end.connect(f"\0{name}")
        except (OSError, ValueError):  # nobody holds them any more
            end.close()
            return None
        return end

    def _read(self, end: socket.socket, work: RankJob, hold: AdoptionPolicy) -> tuple[AdoptedSnapshots | None, str]:
        """What is adopted; or nothing, and why."""
        if not is_same_user(end):
            return None, "are those of another user"
        if not hold.adopts:
            return None, "are not wanted (run.restart)"
        try:
            with end.makefile("rb") as lines:
                line = lines.readline(MAX_STATE_BYTES)
        except ConnectionResetError:
            line = b""
        except TimeoutError:
            return None, f"may still be written: not all of its processes have ended within {TERMINATION_SECONDS:.0f} s"
        if not line:
            return None, "were adopted by another process"
        state = parse_message(line)
        if state["version"] != __version__:
            return None, f"are of version {state['version']}, this is {__version__}"
        if state["job"] != hold.job:
            return None, "are of another job"
        process = peer_credentials(end)[0]
        holdings = None
        for each in reversed(state["sets"]):  # the newest set counts once all ranks have written to it
            holdings = _open_adopted_files(process, each)
            if holdings.kept or each is state["sets"][0]:
                break
            holdings.close()
        assert holdings is not None, "a state without a set"
        holdings.written(0.0)
        return AdoptedSnapshots(
            int(state["generation"]), holdings, state["work"] == _rank_job_digest(work), float(state["killed"])
        ), ""

    # --- of this one
    # ------------------------------------------------------------------------------------------------------

    def hold(self, generation: int, work: RankJob, old: SharedFileStore | None, newest: SharedFileStore) -> None:
        """Hands over what a replacement would adopt, before the ranks of a generation start and whenever a set is no
        longer needed."""
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
        """Replaces a holder that has died, or that nobody could find. Called several times a second."""
        if self._hold is None or not self._line or time.monotonic() < self._started + STARTUP_SECONDS:
            return
        if not self._is_named or self._process is None or self._process.poll() is not None:
            self._begin(self._hold)

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            self.note(
                f"nothing holds the snapshots if this process is killed, which would cost the steps since the last checkpoint: {error}"
            )

    def _begin(self, hold: AdoptionPolicy) -> None:
        """Starts a holder, and lets the one before go once this one has the snapshots. Where the system refuses, the
        run goes on without."""
        self._end()
        self._started, self._is_named = time.monotonic(), False
        name = f"meshwright-{secrets.token_hex(16)}"
        words = [sys.executable, "-m", FD_STORE_MODULE, name, str(hold.seconds), str(self._reading)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            process = self._process = subprocess.Popen(
                words, **pipes, bufsize=0, start_new_session=True, pass_fds=(self._reading,)
            )  # type: ignore[call-overload]
            os.set_blocking(process.stdin.fileno(), False)
            if not self._send(process):
                raise BlockingIOError("the process that holds them does not read")
            if self._before is not None:
                select.select([process.stdout], [], [], STARTUP_SECONDS)
            write_atomically(self.folder / SOCKET_NAME_FILE, name + "\n", private=True)
            self._is_named = True
        except OSError as error:
            self._tell(error)
        self._release()

    def _send(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            return process.stdin.write(self._line) == len(self._line)
        return False

    def _release(self) -> None:
        """The holder of the supervisor before is no longer needed."""
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
        """The run has ended: nothing is left to adopt. A replacement that has not begun leaves what it found where it
        is."""
        self._end()
        if self._is_named:
            self._is_named = False
            with contextlib.suppress(OSError):
                (self.folder / SOCKET_NAME_FILE).unlink(missing_ok=True)
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
    """A set of snapshots that `process` holds. Raises OSError."""
    files: list[int] = []
    try:
        for file in each["files"]:
            files.append(open_snapshot_file(f"/proc/{process}/fd/{int(file)}", each["key"]))
    except OSError:
        for opened in files:
            os.close(opened)
        raise
    return SharedFileStore(int(each["world"]), (each["key"], files))
