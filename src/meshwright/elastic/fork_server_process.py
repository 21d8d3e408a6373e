"""The fork server process of one machine, as its parent uses it: its pipes, its events, its end.

The fork server has its own process group, so that Ctrl-C in the terminal reaches only the supervisor. `close` kills the
whole group and reaps the processes that are left. While the fork server runs, the supervisor adopts orphans
(PR_SET_CHILD_SUBREAPER). So it also reaps ranks whose fork server was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.core import storage
from meshwright.core.ipc import IpcMessage, MessageReader, write_message

PR_SET_CHILD_SUBREAPER = 36
FORK_SERVER_EXIT_SECONDS = 2.0


class ForkServerProcess:
    """A running fork server. The fork server and its children inherit the open files `inherited`."""

    def __init__(
        self, module: str, log: Path, warm: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> None:
        _become_subreaper(True)
        with storage.failures_as_one_line(log):
            handle = storage.open_for_append(log)
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
        self._reader = MessageReader(self._events.fileno())
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._events, selectors.EVENT_READ)
        self._ready: list[IpcMessage] = []
        """The fork server's `ready` event, for an agent that reuses this process."""
        self._pending: list[IpcMessage] = []

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def handle(self) -> int:
        """The descriptor that is readable when there are events."""
        return self._events.fileno()

    def send(self, message: IpcMessage) -> None:
        """Sends a command. If the fork server has died, `read` reports it."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # the fork server has died, or its pipe is closed
            write_message(self._commands.fileno(), message)

    def read(self, timeout: float) -> tuple[list[IpcMessage], bool]:
        """Waits at most `timeout` seconds for an event. Returns the new events, and whether the fork server has
        died."""
        messages, self._pending = self._pending, []
        if messages or not self._waiting.select(timeout):
            return messages, False
        messages, ended = self._reader.read()
        self._ready = [message for message in messages if message["event"] == "ready"] or self._ready
        return messages, ended

    def repeat_ready(self) -> None:
        """Lets `read` return the `ready` event once more, to an agent that reuses this process."""
        self._pending = self._ready

    def status(self) -> int | None:
        """Returns the exit status (negative for a signal), or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(FORK_SERVER_EXIT_SECONDS)
        return None

    def close(self) -> None:
        """Ends the fork server and every rank. A system error in one part of the cleanup does not prevent the
        others."""
        with contextlib.suppress(OSError):
            self._commands.close()  # makes the fork server kill its ranks and exit
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
        """Reaps the dead ranks of a killed fork server."""
        end = time.monotonic() + FORK_SERVER_EXIT_SECONDS
        with contextlib.suppress(OSError):  # no child is left
            while time.monotonic() < end:
                if os.waitpid(-self._process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)


def _become_subreaper(on: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
