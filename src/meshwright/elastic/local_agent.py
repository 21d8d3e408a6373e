"""The agent of one machine: it starts the fork server, sends commands, receives events and cleans up.

`SystemInterface` contains a supervisor's access to the system: connections to other machines, waiting for events, and
the clock. The simulated cluster of the tests (tests/unit/virtual_cluster.py) replaces it by one with virtual time.

The fork server (meshwright.train.forkserver) belongs to the execution packages. So this package starts it by name
(fork_server_process.py) and does not import it.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.ipc import IpcMessage, wait_readable
from meshwright.core.secure_channel import SecureChannel, SecureListener
from meshwright.elastic.fork_server_process import ForkServerProcess
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_inventory import AdoptedSnapshots, AdoptionPolicy
from meshwright.elastic.snapshot_locations import SnapshotLocations
from meshwright.elastic.snapshot_replication import SnapshotReplicator, SnapshotServer


class ReadinessPoller:
    """Waits until one of several file descriptors is readable. A descriptor is registered only once for any number of
    waits."""

    def __init__(self) -> None:
        self._ends = selectors.DefaultSelector()

    def add(self, handle: int, what: Any) -> None:
        """Registers `handle`. `wait` returns `what` when `handle` is readable."""
        self._ends.register(handle, selectors.EVENT_READ, what)

    def remove(self, handle: int) -> None:
        """Unregisters `handle`."""
        self._ends.unregister(handle)

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        """Waits at most `timeout` seconds until a descriptor is readable, then `linger` seconds for further ones.
        Returns the registered values of all readable descriptors.

        A readable descriptor in `also` ends the wait but is not returned.
        """
        if wait_readable(timeout, self._ends.fileno(), *also) and linger:  # type: ignore[attr-defined]
            time.sleep(linger)
        return [key.data for key, _ in self._ends.select(0)]

    def close(self) -> None:
        """Closes the selector."""
        self._ends.close()


def run_periodically(
    do: Callable[[], None], seconds: float, over: threading.Event, failed: Callable[[str], None] = lambda line: None
) -> None:
    """Calls `do` every `seconds` seconds in its own thread, until `over` is set. If a call fails, `failed` receives a
    line."""

    def run() -> None:
        while not over.wait(seconds):
            do()

    start_background_thread("alive", run, failed)


class SystemInterface(NamedTuple):
    """The functions and classes with which a supervisor accesses the system."""

    clock: Callable[[], float] = time.monotonic
    waiting: Callable[[], ReadinessPoller] = ReadinessPoller
    repeat: Callable[..., None] = run_periodically
    door: Callable[..., SecureListener] = SecureListener
    link: Callable[..., SecureChannel] = SecureChannel
    lender: Callable[..., SnapshotServer] = SnapshotServer
    mirror: Callable[..., SnapshotReplicator] = SnapshotReplicator
    holdings: Callable[[int], SharedFileStore] = SharedFileStore


FORK_SERVER_MODULE = "meshwright.train.forkserver"
CLEANUP_SECONDS = 10.0


class LocalAgent:
    """Manages the ranks of this machine and the process that forks them. As a context manager it leaves no process
    behind."""

    slots: tuple[int, ...] | None = None
    """The device ids in a run on several machines, else None."""
    devices: int = 0
    """The number of devices of this machine in a multi-node run."""
    homes: SnapshotLocations | None = None
    """The locations of snapshots in a run on several machines, or None if all snapshots are local."""
    outside: SystemInterface = SystemInterface()
    _server: ForkServerProcess

    def __init__(
        self,
        log: Path,
        warm: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: LocalAgent | None = None,
        lifeline: int | None = None,
    ) -> None:
        """Starts a fork server, or continues with that of `before`.

        `before` is a previous agent after `clear`; this agent replaces it. Its fork server is reused if it has
        preloaded the same modules in the same environment. All processes inherit `lifeline`, the write end of a pipe.
        The read end shows when all of them have ended.
        """
        self._inherited = () if lifeline is None else (lifeline,)
        self.log, self.warm, self.environment = log, tuple(warm), dict(environment or {})
        self.name_of: Callable[[int], str] = str
        """Returns the name of a device for messages."""
        self.ended = True
        if before is None or not self._goes_on_with(before):
            self._open()

    def _goes_on_with(self, before: LocalAgent) -> bool:
        if (before.warm, before.environment) != (self.warm, self.environment):
            before.close()
            return False
        self.log, self.ended, self._server = before.log, before.ended, before._server
        self._server.repeat_ready()
        return True

    def _open(self) -> None:
        self._server = ForkServerProcess(FORK_SERVER_MODULE, self.log, self.warm, self.environment, self._inherited)
        self.ended = False

    def command(self, do: str, rank: int, **more: Any) -> None:
        """Sends a command to the fork server. If the fork server has died, `events` reports it."""
        self._server.send({"do": do, "rank": rank, **more})

    def start(
        self,
        what: IpcMessage,
        logs: Sequence[str],
        slots: Sequence[int],
        holdings: SharedFileStore,
        source: SharedFileStore,
    ) -> None:
        """Starts a rank for each of `logs`.

        `what` is the job of all ranks. Each rank gets a log and a device: from `slots`, or in order if `slots` is
        empty. Ranks write their snapshots to `holdings` and restore from `source`.
        """
        memory = {"sources": holdings.table(map(source.source, range(source.world))), "single_node": True}
        for rank, log in enumerate(logs):
            local = {"local": (slots[rank], len(logs))} if slots else {}
            self.command("start", rank, **what, log=log, **local, memory={**memory, **holdings.places(rank)})

    def events(self, timeout: float) -> list[IpcMessage]:
        """Waits at most `timeout` seconds and returns the new events. If the fork server has died, `ended` becomes
        True."""
        if self.ended:
            return []
        messages, self.ended = self._server.read(timeout)
        return messages

    def clear(self) -> bool:
        """Ends all ranks. Returns whether the fork server is reusable."""
        self.command("clear", 0)
        end = time.monotonic() + CLEANUP_SECONDS
        while not self.ended and time.monotonic() < end:
            if any(event["event"] == "clear" for event in self.events(0.05)):
                return True
        return False

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._server.pid

    @property
    def handle(self) -> int:
        """The descriptor that is readable when there are events."""
        return self._server.handle

    def signs(self, process: int) -> ProcStats:
        """Returns the process statistics of a rank."""
        return read_proc_stats(process)

    @property
    def is_blind(self) -> bool:
        """Whether heartbeats of some ranks cannot arrive now."""
        return False

    @property
    def places(self) -> int | None:
        """The number of ranks for which there are devices, or None if there is no limit."""
        return None if self.slots is None else len(self.slots)

    def adopt(self, policy: AdoptionPolicy | None) -> tuple[AdoptedSnapshots | None, list[str]]:
        """Returns the snapshots that other nodes retained when their leader was lost, and why some are not adopted."""
        return None, []

    def hold(self, holdings: SharedFileStore) -> None:
        """Registers the store to which the next ranks write their snapshots."""

    def released(self) -> None:
        """Records that the snapshots of the previous generation are no longer needed."""

    def again(self) -> None:
        """Kills the fork server and every rank, and starts a new fork server, which sends `ready`. This also ends ranks
        that cannot be killed one by one.

        If the system cannot start it, `ended` is True, as for a fork server that dies at once.
        """
        self.close()
        with contextlib.suppress(OSError, storage.StorageFailed):
            self._open()

    def status(self) -> int | None:
        """Returns the exit status of a fork server that has closed its pipe (negative for a signal), or None if it
        still runs."""
        return self._server.status()

    def close(self) -> None:
        """Ends the fork server and every rank. A system error in one part of the cleanup does not prevent the
        others."""
        self._server.close()
        self.ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
