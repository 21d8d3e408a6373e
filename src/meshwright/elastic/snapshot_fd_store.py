"""Runs the FD store: a process that keeps the in-memory snapshots of a run open after its supervisor was killed, until
a replacement of the supervisor adopts them. The supervisor starts it (snapshot_adoption.py).

Guarantees:
- The supervisor ends the process at every normal end of a run. After the death of the supervisor, the process ends when
  a replacement has adopted the snapshots, or after `seconds` seconds without a replacement.
- No process receives the snapshots while another process can still write to them. The supervisor, the fork server and
  all ranks have the write end of a pipe, the lifeline. The FD store waits until all of them have closed it.
- The FD store answers only processes of its own user, one at a time.

The FD store reads states from standard input, one per line (`SnapshotAdoption.hold`). A state has the sets of snapshots
with the paths of their files. For each state, the FD store opens new files and closes files that the state does not
contain. After the first state it closes standard output, as a sign that it has the snapshots.

A replacement connects to the abstract Unix socket NAME and receives the newest state, in which files are descriptor
numbers of the FD store. The replacement opens them under /proc and sends `taken`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from meshwright.core.ipc import IpcMessage, MessageReader
from meshwright.core.signals import STOP_SIGNALS

ADOPTED_REPLY = b"taken"
ADOPTION_SECONDS = 600.0
"""A connected replacement must adopt the snapshots within this time, in which it also loads torch."""

SEND_SECONDS = 5.0


class SnapshotFdStore:
    """Keeps the files of the snapshots open, until its process ends. `name`: the name of the socket. `seconds`: how
    long the process waits for a replacement. `lifeline`: the read end of the lifeline pipe."""

    def __init__(self, name: str, seconds: float, lifeline: int) -> None:
        self.seconds, self.lifeline = seconds, lifeline
        self.commands = MessageReader(0)
        self.files: dict[str, list[int]] = {}
        """The open files of each set, by the key of the set."""
        self.state: IpcMessage = {}
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(f"\0{name}")
        self.listening.listen(8)
        self.replacement: socket.socket | None = None
        self.killed_at: float | None = None
        self.deadline: float | None = None
        """The time when the process ends, or None while the supervisor is alive."""
        self.is_taken = False
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(0, selectors.EVENT_READ, self._receive)
        self.waiting.register(lifeline, selectors.EVENT_READ, self._await_end_of_writers)

    def run(self) -> None:
        """Runs until the snapshots are adopted or the deadline has passed."""
        while not self.is_taken:
            left = None if self.deadline is None else self.deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self.waiting.select(left):
                key.data()

    def _receive(self) -> None:
        messages, ended = self.commands.read()
        for message in messages:
            # The supervisor may be killed before the files of this state are open. Then the previous state stays valid.
            with contextlib.suppress(OSError):
                self._replace(message)
        if ended:
            self.waiting.unregister(0)
            self.killed_at = time.monotonic()
            self.deadline = self.killed_at + self.seconds

    def _replace(self, state: IpcMessage) -> None:
        """Replaces the state by `state`. The files of a set that is in both states stay open. Raises OSError, and keeps
        the previous state, if a file cannot be opened."""
        fresh: dict[str, list[int]] = {}
        try:
            for each in state["sets"]:
                if each["key"] not in self.files:
                    fresh[each["key"]] = opened = []
                    for path in each["files"]:
                        opened.append(open_snapshot_file(path, each["key"]))
        except OSError:
            _close_files(fresh)
            raise
        keys = {each["key"] for each in state["sets"]}
        _close_files({key: self.files.pop(key) for key in self.files.keys() - keys})
        self.files |= fresh
        if not self.state:
            os.close(1)
        self.state = state

    def _await_end_of_writers(self) -> None:
        if os.read(self.lifeline, 64):
            return
        self.waiting.unregister(self.lifeline)
        if self.deadline is None:
            self._receive()  # the dead supervisor's last states may still be in the pipe
        self.waiting.register(self.listening, selectors.EVENT_READ, self._admit)

    def _admit(self) -> None:
        end, _ = self.listening.accept()
        if not is_same_user(end) or not self.state or self.killed_at is None:
            end.close()
            return
        sets = [{**each, "files": self.files[each["key"]]} for each in self.state["sets"]]
        answer = {**self.state, "sets": sets, "killed": time.monotonic() - self.killed_at}
        end.settimeout(SEND_SECONDS)
        with contextlib.suppress(OSError):  # if the replacement has disconnected, `_finish` admits the next one
            end.sendall(json.dumps(answer).encode() + b"\n")
        self.replacement, self.deadline = end, time.monotonic() + ADOPTION_SECONDS
        self.waiting.unregister(self.listening)
        self.waiting.register(end, selectors.EVENT_READ, self._finish)

    def _finish(self) -> None:
        """Handles the reply of the replacement, or its end. If it has not adopted the snapshots, another replacement
        may connect."""
        assert self.replacement is not None
        received = b""
        with contextlib.suppress(OSError):
            received = self.replacement.recv(64)
        self.is_taken = received == ADOPTED_REPLY
        self.waiting.unregister(self.replacement)
        self.replacement.close()
        self.replacement, self.deadline = None, time.monotonic() + self.seconds
        self.waiting.register(self.listening, selectors.EVENT_READ, self._admit)


def open_snapshot_file(path: str, key: str) -> int:
    """Returns a new descriptor of the anonymous file at `path`, which belongs to the set `key`. Raises OSError if it
    cannot be opened, or if the path now refers to another file."""
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    name = os.readlink(f"/proc/self/fd/{file}")
    if not (name.startswith("/memfd:meshwright-") and key in name):
        os.close(file)
        raise OSError(f"{path} is {name}")
    return file


def _close_files(files: dict[str, list[int]]) -> None:
    for file in (file for opened in files.values() for file in opened):
        os.close(file)


def peer_credentials(end: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user id of the peer of a Unix socket, as the kernel reports them."""
    process, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return process, user


def is_same_user(end: socket.socket) -> bool:
    """Returns whether the peer of a Unix socket runs as the user of this process."""
    return peer_credentials(end)[1] == os.geteuid()


def main() -> None:
    """Runs the FD store. The command line has NAME, SECONDS and the descriptor LIFELINE."""
    name, seconds, lifeline = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the supervisor, which receives the signal too, must react to it
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("mesh-holder")
    os.chdir("/")
    SnapshotFdStore(name, seconds, lifeline).run()


if __name__ == "__main__":
    main()
