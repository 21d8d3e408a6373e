"""Sends JSON lines over pipes between the processes of one machine. Each line is one object. There is no pickle, and
received data is never executed.

Guarantees: a reader never blocks, and it reassembles a line that arrives in several reads. A writer writes the whole
line or raises OSError.

>>> import os
>>> ours, theirs = os.pipe()
>>> write_message(theirs, {"event": "ready"}); os.close(theirs)
>>> MessageReader(ours).read()
([{'event': 'ready'}], True)
>>> os.close(ours)
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterable
from typing import Any

from meshwright.core.messages import pack_messages, unpack_messages

IpcMessage = dict[str, Any]

MAX_MESSAGE_DEPTH = 32
"""Maximum depth of nested lists and objects."""


def write_message(handle: int, message: IpcMessage) -> None:
    """Writes `message` as one line to `handle`, a blocking pipe."""
    rest = memoryview(json.dumps(pack_messages(message), separators=(",", ":")).encode() + b"\n")
    while rest:
        rest = rest[os.write(handle, rest) :]


def wait_readable(timeout: float, *handles: int) -> bool:
    """Waits at most `timeout` seconds until one of `handles` is readable or closed. Returns whether one of them is. It
    opens no file descriptor, and descriptors may have any value."""
    return _poll(timeout, select.POLLIN, handles)


def wait_writable(timeout: float, handle: int) -> bool:
    """Waits at most `timeout` seconds until `handle` accepts more bytes or is closed. Returns whether `handle` is in
    this state."""
    return _poll(timeout, select.POLLOUT, (handle,))


def _poll(timeout: float, event: int, handles: Iterable[int]) -> bool:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, event)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def parse_message(line: bytes) -> IpcMessage:
    """Returns the object in `line`.

    Raises: ValueError if the line is not one object, or is nested deeper than `MAX_MESSAGE_DEPTH`.

    >>> parse_message(b'{"do": "end"}')
    {'do': 'end'}
    """
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(found, dict):
        raise ValueError("no object")
    level: list[Any] = [found]
    for _ in range(MAX_MESSAGE_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return unpack_messages(found)
    raise ValueError("too deep")


class MessageReader:
    """Reads the messages that have arrived on a pipe or a connection. A line longer than `longest` bytes raises
    ValueError."""

    def __init__(self, handle: int, longest: int | None = None) -> None:
        os.set_blocking(handle, False)
        self.handle, self.longest = handle, longest
        self._rest = b""

    def read(self) -> tuple[list[IpcMessage], bool]:
        """Returns the messages that have arrived since the last call, and whether the writer has closed the
        connection."""
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
