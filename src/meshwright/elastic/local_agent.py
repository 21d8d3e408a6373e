"""What a supervisor has of the world outside of its process: what it opens towards other machines, how it waits for
them, and its clock.

A simulated cluster (tests/unit/virtual_cluster.py) gives the same supervisors others, in virtual time.

The supervisor's end of the zygote: starts it, commands it, hears it, and leaves nothing of it behind.

The zygote (meshwright.train.forkserver: a process of the running wing, started by name, never imported here) stands in
a process group of
its own, so that a Ctrl-C of the terminal reaches the supervisor alone. `close` ends the whole group and reaps what is
left of it: while
a nursery is open this process adopts orphans (PR_SET_CHILD_SUBREAPER), so that even ranks whose zygote was killed are
reaped.
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
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from meshwright.core.ipc import IpcMessage, MessageReader, write_message
from meshwright.core.secure_channel import SecureChannel, SecureListener
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_locations import SnapshotLocations
from meshwright.elastic.snapshot_replication import SnapshotReplicator, SnapshotServer


class ReadinessPoller:
    """Waits until one of several ends is readable. They are registered once, however often and by however many the
    process waits."""

    def __init__(self) -> None:
        self._ends = selectors.DefaultSelector()

    def add(self, handle: int, what: Any) -> None:
        """`what`: returned by `wait` when `handle` is readable."""
        self._ends.register(handle, selectors.EVENT_READ, what)

    def remove(self, handle: int) -> None:
        self._ends.unregister(handle)

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        """What is readable `linger` seconds after something was, which is waited for `timeout` seconds at most; an end
        of `also` ends the wait and is not
        returned."""
        with selectors.DefaultSelector() as first:
            for handle in (self._ends.fileno(), *also):  # type: ignore[attr-defined]
                first.register(handle, selectors.EVENT_READ)
            if first.select(timeout) and linger:
                time.sleep(linger)
        return [key.data for key, _ in self._ends.select(0)]

    def close(self) -> None:
        self._ends.close()


def run_periodically(do: Callable[[], None], seconds: float, over: threading.Event) -> None:
    """Calls `do` every so many seconds until it is `over`, in a thread of its own."""

    def run() -> None:
        while not over.wait(seconds):
            do()

    threading.Thread(target=run, name="alive", daemon=True).start()


class SystemInterface(NamedTuple):
    """Of one supervisor."""

    clock: Callable[[], float] = time.monotonic
    waiting: Callable[[], ReadinessPoller] = ReadinessPoller
    repeat: Callable[[Callable[[], None], float, threading.Event], None] = run_periodically
    door: Callable[..., SecureListener] = SecureListener
    link: Callable[..., SecureChannel] = SecureChannel
    lender: Callable[..., SnapshotServer] = SnapshotServer
    mirror: Callable[..., SnapshotReplicator] = SnapshotReplicator
    holdings: Callable[[int], SharedFileStore] = SharedFileStore


PR_SET_CHILD_SUBREAPER = 36
FORK_SERVER_MODULE = "meshwright.train.forkserver"
FORK_SERVER_EXIT_SECONDS = 2.0
CLEANUP_SECONDS = 10.0


class LocalAgent:
    """Ranks and the process that forks them. A context manager: nothing outlives it."""

    slots: tuple[int, ...] | None = None
    """The devices of several machines, counted on; None: those of this one."""
    devices: int = 0
    """Of this machine, where there are several."""
    homes: SnapshotLocations | None = None
    """Where copies lie over several machines; None: all of them here."""
    outside: SystemInterface = SystemInterface()

    def __init__(
        self,
        log: Path,
        warm: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: LocalAgent | None = None,
        lifeline: int | None = None,
    ) -> None:
        """`before`: one that is as new (`clear`) and ends here; its process goes on where it is such a one. `lifeline`:
        an open file that all processes
        which come of this inherit, so that its other end shows when all of them have ended."""
        self._inherited = () if lifeline is None else (lifeline,)
        self.log, self.warm, self.environment = log, tuple(warm), dict(environment or {})
        self.name_of: Callable[[int], str] = str
        """A device, in words."""
        self._ready: list[IpcMessage] = []
        """That it is, for whoever goes on with its process."""
        self._pending: list[IpcMessage] = []
        if before is None or not self._goes_on_with(before):
            self._open()

    def _goes_on_with(self, before: LocalAgent) -> bool:
        if (before.warm, before.environment) != (self.warm, self.environment):
            before.close()
            return False
        taken = ("log", "ended", "_ready", "_process", "_commands", "_events", "_reader", "_waiting")
        vars(self).update({name: vars(before)[name] for name in taken})
        self._pending = self._ready
        return True

    def _open(self) -> None:
        _become_subreaper(True)
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", FORK_SERVER_MODULE, str(os.getpid()), *self.warm],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                bufsize=0,
                env={**os.environ, **self.environment},
                process_group=0,
                pass_fds=self._inherited,
            )
        finally:
            os.close(handle)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, events = self._process.stdin, self._process.stdout
        self._reader = MessageReader(events.fileno())
        self._events = events
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(events, selectors.EVENT_READ)
        self.ended = False
        self._ready = []

    def command(self, do: str, rank: int, **more: Any) -> None:
        """Tells the zygote. One that is gone is noticed by `events`."""
        with contextlib.suppress(BrokenPipeError):
            write_message(self._commands.fileno(), {"do": do, "rank": rank, **more})

    def start(
        self,
        what: IpcMessage,
        logs: Sequence[str],
        slots: Sequence[int],
        holdings: SharedFileStore,
        source: SharedFileStore,
    ) -> None:
        """Starts a rank for each of `logs`: what all of them do, where each writes and on which device, by the `slots`
        or in order. They keep their
        copies in `holdings` and go on from those of `source`."""
        memory = {"sources": holdings.table(map(source.source, range(source.world))), "beside": True}
        for rank, log in enumerate(logs):
            local = {"local": (slots[rank], len(logs))} if slots else {}
            self.command("start", rank, **what, log=log, **local, memory={**memory, **holdings.places(rank)})

    def events(self, timeout: float) -> list[IpcMessage]:
        """What happened, waiting for it at most `timeout` seconds. `ended` is True once the zygote is gone."""
        messages, self._pending = self._pending, []
        if messages or self.ended or not self._waiting.select(timeout):
            return messages
        messages, self.ended = self._reader.read()
        self._ready = [message for message in messages if message["event"] == "ready"] or self._ready
        return messages

    def clear(self) -> bool:
        """Ends all ranks. Whether it is as new then."""
        self.command("clear", 0)
        end = time.monotonic() + CLEANUP_SECONDS
        while not self.ended and time.monotonic() < end:
            if any(event["event"] == "clear" for event in self.events(0.05)):
                return True
        return False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def handle(self) -> int:
        """Readable when there are events."""
        return self._events.fileno()

    def signs(self, process: int) -> ProcStats:
        """What the system says of a rank's process."""
        return read_proc_stats(process)

    @property
    def is_blind(self) -> bool:
        """Whether there are ranks of which nothing is heard now."""
        return False

    @property
    def places(self) -> int | None:
        """Ranks that there is room for; None: as many as are asked for."""
        return None if self.slots is None else len(self.slots)

    def hold(self, holdings: SharedFileStore) -> None:
        """What the next ranks keep their copies in."""

    def released(self) -> None:
        """Nobody needs the copies of the generation before any more."""

    def again(self) -> None:
        """Ends every rank that will not end otherwise, and the zygote with them; another zygote takes its place and
        says `ready`.

        Where the system can start none now, this has `ended`, as when the new one had died at once.
        """
        self.close()
        with contextlib.suppress(OSError):
            self._open()

    def status(self) -> int | None:
        """How a zygote that closed its pipe ended: its exit status, negative for a signal; None if it still lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(FORK_SERVER_EXIT_SECONDS)
        return None

    def close(self) -> None:
        """Ends the zygote and every rank. No error of the system on the way keeps the rest from being done."""
        with contextlib.suppress(OSError):
            self._commands.close()  # asks the zygote to kill its ranks and go
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
        self.ended = True
        _become_subreaper(False)

    def _reap(self) -> None:
        """The ranks that a killed zygote left: dead by now, but not yet buried."""
        end = time.monotonic() + FORK_SERVER_EXIT_SECONDS
        with contextlib.suppress(OSError):  # no child is left
            while time.monotonic() < end:
                if os.waitpid(-self._process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _become_subreaper(on: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
