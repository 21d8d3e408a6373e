"""Manages the ranks of one machine: starts the fork server that forks them, sends commands, receives events and cleans
up. The supervisor uses it. The agents of several machines (cluster_agent.py, node.py) build on it.

`SystemInterface` contains the functions through which a supervisor connects to other machines, waits for events and
reads the clock. The simulated cluster of the tests (tests/unit/virtual_cluster.py) replaces it by an interface with
virtual time.

The fork server (meshwright.train.forkserver) belongs to the execution packages, which meshwright.elastic must not
import. So this module starts the fork server by the name of its module.

The fork server has its own process group, so that Ctrl-C in the terminal reaches only the supervisor. `close` kills the
whole group and reaps the remaining processes. While the fork server runs, the supervisor adopts orphans
(PR_SET_CHILD_SUBREAPER). So it can also reap ranks whose fork server was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.ipc import IpcMessage, MessageReader, message_line, wait_readable, wait_writable
from meshwright.core.secure_channel import SecureChannel, SecureListener
from meshwright.core.storage_deadline import answer_in_time
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_inventory import AdoptedSnapshots, AdoptionPolicy
from meshwright.elastic.snapshot_replication import SnapshotReplicator, SnapshotServer

PR_SET_CHILD_SUBREAPER = 36
FORK_SERVER_EXIT_SECONDS = 2.0
SEND_SECONDS = 1.0
"""A command waits at most this long for a fork server that does not read."""


class ForkServerProcess:
    """The fork server process of one machine, from the view of its parent. `module`: the module to run. `warm`: the
    modules that it imports before it forks. It and its children inherit the descriptors `inherited`."""

    def __init__(
        self, module: str, log: Path, warm: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> None:
        _become_subreaper(True)
        with storage.failures_as_one_line(log):
            handle = answer_in_time(log, partial(storage.open_for_append, log))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), *warm],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                bufsize=0,
                env={**os.environ, **environment},
                process_group=0,
                pass_fds=tuple(inherited),
            )
        finally:
            storage.close_quietly(handle)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._events = self._process.stdin, self._process.stdout
        os.set_blocking(self._commands.fileno(), False)
        self._unsent = bytearray()
        """The commands that the pipe has not taken yet."""
        self._reader = MessageReader(self._events.fileno())
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._events, selectors.EVENT_READ)
        self._ready: list[IpcMessage] = []
        """The event `ready` of the fork server, for an agent that reuses this process."""
        self._pending: list[IpcMessage] = []

    @property
    def pid(self) -> int:
        """Returns the process id of the fork server."""
        return self._process.pid

    @property
    def handle(self) -> int:
        """Returns the descriptor that is readable if there are events."""
        return self._events.fileno()

    def send(self, message: IpcMessage) -> None:
        """Sends a command. If the fork server has died, nothing happens; `read` reports its death. What a fork server
        does not read within SEND_SECONDS is sent by later calls of `send` and `read`. So it cannot block its parent."""
        patience = 0.0 if self._unsent else SEND_SECONDS
        self._unsent += message_line(message)
        self._flush(patience)

    def _flush(self, patience: float) -> None:
        """Writes the unsent commands. Waits at most `patience` seconds for space in the pipe."""
        try:
            while self._unsent:
                try:
                    del self._unsent[: os.write(self._commands.fileno(), self._unsent)]
                except BlockingIOError:
                    if not patience or not wait_writable(patience, self._commands.fileno()):
                        return
        except (BrokenPipeError, ValueError):  # raised if the fork server has died or was closed
            self._unsent.clear()

    def read(self, timeout: float) -> tuple[list[IpcMessage], bool]:
        """Waits at most `timeout` seconds for an event. Returns the new events, and whether the fork server has
        ended."""
        self._flush(0.0)
        messages, self._pending = self._pending, []
        if messages or not self._waiting.select(timeout):
            return messages, False
        messages, ended = self._reader.read()
        self._ready = [message for message in messages if message["event"] == "ready"] or self._ready
        return messages, ended

    def repeat_ready(self) -> None:
        """Makes `read` return the event `ready` again, to an agent that reuses this process."""
        self._pending = self._ready

    def status(self) -> int | None:
        """Waits up to FORK_SERVER_EXIT_SECONDS for the end of the process. Returns its exit code, the negative number
        of a signal, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(FORK_SERVER_EXIT_SECONDS)
        return None

    def close(self) -> None:
        """Ends the fork server and every rank. A system error in one cleanup action does not prevent the others."""
        with contextlib.suppress(OSError):
            self._commands.close()  # the fork server then kills its ranks and exits
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.wait(FORK_SERVER_EXIT_SECONDS)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.wait()
        self._reap()
        for part in (self._waiting, self._events):
            with contextlib.suppress(OSError):
                part.close()
        _become_subreaper(False)

    def _reap(self) -> None:
        """Reaps the dead ranks of a killed fork server, which this process has adopted."""
        end = time.monotonic() + FORK_SERVER_EXIT_SECONDS
        with contextlib.suppress(OSError):  # raised when no child is left
            while time.monotonic() < end:
                if os.waitpid(-self._process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)


def _become_subreaper(on: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


class ReadinessPoller:
    """Waits until one of several descriptors is readable. A descriptor is registered once for all waits."""

    def __init__(self) -> None:
        self._ends = selectors.DefaultSelector()

    def add(self, handle: int, what: Any) -> None:
        """Registers the descriptor `handle`. `wait` returns `what` if it is readable."""
        self._ends.register(handle, selectors.EVENT_READ, what)

    def remove(self, handle: int) -> None:
        """Unregisters `handle`."""
        self._ends.unregister(handle)

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        """Waits at most `timeout` seconds until a registered descriptor or one of `also` is readable, then `linger`
        seconds for further ones. Returns the registered values of all readable descriptors."""
        if wait_readable(timeout, self._ends.fileno(), *also) and linger:  # type: ignore[attr-defined]
            time.sleep(linger)
        return [key.data for key, _ in self._ends.select(0)]

    def close(self) -> None:
        """Closes the poller. The registered descriptors stay open."""
        self._ends.close()


def run_periodically(
    do: Callable[[], None], seconds: float, over: threading.Event, failed: Callable[[str], None] = lambda line: None
) -> None:
    """Starts a thread that calls `do` every `seconds` seconds until `over` is set. If a call fails, `failed` receives a
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
    """Manages the ranks of this machine and their fork server. As a context manager it leaves no process behind."""

    slots: tuple[int, ...] | None = None
    """The ids of all devices in a run on several machines, else None."""
    devices: int = 0
    """The number of devices of this machine in a run on several machines, else 0."""
    homes: SnapshotLocations | None = None
    """The record of snapshot locations in a run on several machines, else None."""
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
        """Starts a fork server, or reuses that of `before`.

        `warm`: the modules that the fork server imports. `environment`: additional variables of its environment.
        `before`: the agent that this agent replaces, after its `clear`. Its fork server is reused if it was started
        with equal `warm` and `environment`, and closed otherwise. `lifeline`: the write end of a pipe that all
        processes inherit, so that the read end shows when all of them have ended.
        """
        self._inherited = () if lifeline is None else (lifeline,)
        self.log, self.warm, self.environment = log, tuple(warm), dict(environment or {})
        self.name_of: Callable[[int], str] = str
        """Returns the readable name of a device id."""
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
        """Sends the command `do` for `rank`, with the fields `more`, to the fork server (train/forkserver.py). If the
        fork server has died, nothing happens; `ended` becomes True."""
        self._server.send({"do": do, "rank": rank, **more})

    def start(
        self,
        what: IpcMessage,
        logs: Sequence[str],
        slots: Sequence[int],
        holdings: SharedFileStore,
        source: SharedFileStore,
    ) -> None:
        """Starts a rank for each log file in `logs`.

        `what`: the fields of the command `start` that are equal for all ranks. `slots`: the device id of each rank; if
        it is empty, ranks take the devices in order. Ranks write their snapshots to `holdings` and resume from those in
        `source`.
        """
        memory = {"sources": holdings.table(map(source.source, range(source.world))), "single_node": True}
        for rank, log in enumerate(logs):
            local = {"local": (slots[rank], len(logs))} if slots else {}
            self.command("start", rank, **what, log=log, **local, memory={**memory, **holdings.places(rank)})

    def events(self, timeout: float) -> list[IpcMessage]:
        """Waits at most `timeout` seconds for events of the fork server and returns them. If the fork server has died,
        `ended` becomes True."""
        if self.ended:
            return []
        messages, self.ended = self._server.read(timeout)
        return messages

    def clear(self) -> bool:
        """Kills all ranks. Returns whether the fork server has confirmed this within CLEANUP_SECONDS, so that it is
        reusable."""
        self.command("clear", 0)
        end = time.monotonic() + CLEANUP_SECONDS
        while not self.ended and time.monotonic() < end:
            if any(event["event"] == "clear" for event in self.events(0.05)):
                return True
        return False

    @property
    def pid(self) -> int:
        """Returns the process id of the fork server."""
        return self._server.pid

    @property
    def handle(self) -> int:
        """Returns the descriptor that is readable if there are events."""
        return self._server.handle

    def signs(self, process: int) -> ProcStats:
        """Returns the statistics of the rank with the process id `process`."""
        return read_proc_stats(process)

    @property
    def is_blind(self) -> bool:
        """Returns whether heartbeats of some ranks cannot arrive now. On one machine this is always False."""
        return False

    @property
    def places(self) -> int | None:
        """Returns the number of connected devices in a run on several machines, else None."""
        return None if self.slots is None else len(self.slots)

    def adopt(self, policy: AdoptionPolicy | None) -> tuple[AdoptedSnapshots | None, list[str]]:
        """Returns the snapshots that nodes have retained from a lost leader, or None, and the reasons why some are not
        adopted. On one machine there are none."""
        return None, []

    def hold(self, holdings: SharedFileStore) -> None:
        """Registers `holdings`, to which the next ranks write their snapshots. On one machine it does nothing."""

    def released(self) -> None:
        """Records that snapshots of earlier ranks are no longer needed. On one machine it does nothing."""

    def again(self) -> None:
        """Kills the fork server and every rank, and starts a new fork server, which sends `ready`. This also ends a
        rank that survives a signal sent to it alone. If the system cannot start a process, `ended` is True."""
        self.close()
        with contextlib.suppress(OSError, storage.StorageFailed):
            self._open()

    def status(self) -> int | None:
        """Returns how a fork server that has closed its pipe ended: its exit code, the negative number of the signal
        that killed it, or None if it still runs."""
        return self._server.status()

    def close(self) -> None:
        """Ends the fork server and every rank."""
        self._server.close()
        self.ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
