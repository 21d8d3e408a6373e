"""Connects the processes of a job on one machine: by JSON lines over pipes, and by heartbeats in shared memory.

Each line is one JSON object. Nothing is pickled, and received data is never executed.

Guarantees: `MessageReader.read` never blocks, and it reassembles a line that arrives in several reads. `write_message`
writes the whole line or raises OSError.

>>> import os
>>> ours, theirs = os.pipe()
>>> write_message(theirs, {"event": "ready"}); os.close(theirs)
>>> MessageReader(ours).read()
([{'event': 'ready'}], True)
>>> os.close(ours)

`Heartbeat` reports the progress of a rank to its supervisor through shared memory, without messages. Each rank writes
only its own row of 64-bit fields, and the supervisor reads all rows. The supervisor owns the memory (an anonymous
file). So the supervisor can read the last phase of a dead rank and the step of the rank's in-memory checkpoint. Without
a supervisor the row is private memory of the rank.

>>> pulse = Heartbeat(memoryview(bytearray(2 * HEARTBEAT_FIELDS * 8)), 1)
>>> pulse.at(RankPhase.reduce, 7)
>>> (Heartbeat(pulse.memory, 1).read(HeartbeatField.step), RankPhase(pulse.read(HeartbeatField.phase)).name,
...     Heartbeat(pulse.memory, 0).read(HeartbeatField.beat))
(7, 'reduce', 0)
"""

from __future__ import annotations

import json
import mmap
import os
import select
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from meshwright.core.messages import pack_messages, unpack_messages

IpcMessage = dict[str, Any]

MAX_MESSAGE_DEPTH = 32
"""Maximum depth of nested lists and objects in a message."""


def write_message(handle: int, message: IpcMessage) -> None:
    """Writes `message` as one line to the file descriptor `handle` of a blocking pipe.

    Raises: OSError if the reader has closed the pipe.
    """
    rest = memoryview(message_line(message))
    while rest:
        rest = rest[os.write(handle, rest) :]


def message_line(message: IpcMessage) -> bytes:
    """Returns the line that `write_message` writes."""
    return json.dumps(pack_messages(message), separators=(",", ":")).encode() + b"\n"


def wait_readable(timeout: float, *handles: int) -> bool:
    """Waits at most `timeout` seconds until one of `handles` is readable or closed. Returns whether this happened. In
    contrast to `select`, file descriptors may have any value."""
    return _poll(timeout, select.POLLIN, handles)


def wait_writable(timeout: float, handle: int) -> bool:
    """Waits at most `timeout` seconds until `handle` accepts more bytes or is closed. Returns whether this happened."""
    return _poll(timeout, select.POLLOUT, (handle,))


def _poll(timeout: float, event: int, handles: Iterable[int]) -> bool:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, event)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def parse_message(line: bytes) -> IpcMessage:
    """Returns the JSON object in `line`.

    Raises: ValueError if the line is not one JSON object, or if the object is nested deeper than `MAX_MESSAGE_DEPTH`.

    >>> parse_message(b'{"do": "end"}')
    {'do': 'end'}
    """
    try:
        found = json.loads(line.decode())
    except RecursionError:
        raise ValueError(f"the message is nested deeper than {MAX_MESSAGE_DEPTH} levels") from None
    if not isinstance(found, dict):
        raise ValueError("the message is not a JSON object")
    # Of the 1,000 lines a second that a leader reads, almost none are nested or contain a message.
    unpack = unpack_messages if b'"msgid"' in line else lambda data: data
    if line.count(b"[") + line.count(b"{") <= MAX_MESSAGE_DEPTH:
        return unpack(found)
    level: list[Any] = [found]
    for _ in range(MAX_MESSAGE_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return unpack(found)
    raise ValueError(f"the message is nested deeper than {MAX_MESSAGE_DEPTH} levels")


class MessageReader:
    """Reads the messages that have arrived on a pipe or a socket. Lines may have at most `longest` bytes, None for no
    limit."""

    def __init__(self, handle: int, longest: int | None = None) -> None:
        os.set_blocking(handle, False)
        self.handle, self.longest = handle, longest
        self._rest = b""

    def read(self) -> tuple[list[IpcMessage], bool]:
        """Returns the messages that have arrived since the last call, and whether the writer has closed its end.

        Raises: ValueError if a line is too long or is not a message.
        """
        ended = False
        while True:
            try:
                block = os.read(self.handle, 65536)
            except BlockingIOError:
                break
            if not block:
                ended = True
                break
            self._rest += block
            if self.longest is not None and len(self._rest) > self.longest:
                break
        *lines, self._rest = self._rest.split(b"\n")
        if self.longest is not None and max(map(len, [*lines, self._rest])) > self.longest:
            raise ValueError("a line is too long")
        return [parse_message(line) for line in lines], ended


HEARTBEAT_FIELDS = 9
"""Number of 64-bit fields in the row of a rank."""


WAIT_INCREMENT = 1 << 16
"""Increment of the field `waits` each time that a rank polls for data of another rank without success."""


class HeartbeatField(IntEnum):
    """The index of each field in a row.

    - `step` is the step in progress.
    - `phase` is the current `RankPhase`.
    - `beat` increases with every sign of progress.
    - `waits` is 1 + the rank for which this rank waits, plus `WAIT_INCREMENT` for each unsuccessful poll. So the field
      of a waiting rank keeps changing.
    - `snapshot_step` is the newest step with a complete in-memory checkpoint.
    - `busy` is 1 while an asynchronous checkpoint is written. The supervisor resets it to 0.
    - `saved` is the duration of the last checkpoint in microseconds.
    - `took` is the duration of the last complete step in microseconds.
    - `saving` is 1 while the rank itself writes a checkpoint. It stays 1 if the rank is killed meanwhile.
    """

    step = 0
    phase = 1
    beat = 2
    waits = 3
    snapshot_step = 4
    busy = 5
    saved = 6
    took = 7
    saving = 8


class RankPhase(IntEnum):
    """What a rank does at present. The values up to `restore` belong to start-up, and those from `data` (4) through
    `compare` (9) to a training step."""

    start = 0
    join = 1
    build = 2
    restore = 3
    data = 4
    backward = 5
    reduce = 6
    agree = 7
    update = 8
    compare = 9
    evaluate = 10
    save = 11
    sample = 12
    end = 13
    prove = 14


class Heartbeat:
    """Reads and writes the row of `rank` in `memory`, which has the rows of all ranks."""

    def __init__(self, memory: memoryview, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory, self.rank, self.clock = memory, rank, clock
        self.row = memory.cast("B").cast("Q")[rank * HEARTBEAT_FIELDS : (rank + 1) * HEARTBEAT_FIELDS]
        self._began: float | None = None

    def at(self, phase: RankPhase, step: int | None = None) -> None:
        """Records that the rank enters `phase`. If `step` is given, also records that the rank begins this step."""
        if step is not None:
            self._begin(step)
        self.row[HeartbeatField.phase] = phase
        self.beat()

    def beat(self) -> None:
        """Records a sign of progress within the current phase."""
        self.row[HeartbeatField.beat] += 1

    def _begin(self, step: int) -> None:
        """Records that `step` begins. If the previous step was `step` - 1, records the duration of the previous step in
        the field `took`. Otherwise sets this field to 0."""
        now = self.clock()
        is_next = self._began is not None and step == self.row[HeartbeatField.step] + 1
        self.row[HeartbeatField.took] = max(1, int(1e6 * (now - (self._began or 0.0)))) if is_next else 0
        self._began = now
        self.row[HeartbeatField.step] = step

    def read(self, word: HeartbeatField) -> int:
        """Returns the value of the field `word`."""
        return self.row[word]

    def write(self, word: HeartbeatField, value: int) -> None:
        """Sets the field `word` to `value`."""
        self.row[word] = value


def open_heartbeats(path: str, world: int) -> memoryview:
    """Returns the memory with the rows of `world` ranks in the file at `path`. If `path` is '', the memory is
    private.
    """
    size = world * HEARTBEAT_FIELDS * 8
    if not path:
        return memoryview(bytearray(size))
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(handle, size))
    finally:
        os.close(handle)
