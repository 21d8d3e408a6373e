"""JSON lines over pipes: how the processes of one machine speak with each other. One object a line, no pickle, nothing is ever executed.

Promise: a reader never blocks and never loses the half line that a write cut in two; a writer writes the whole line or raises OSError.

>>> import os
>>> ours, theirs = os.pipe()
>>> write_line(theirs, {"event": "ready"}); os.close(theirs)
>>> LineReader(ours).read()
([{'event': 'ready'}], True)
>>> os.close(ours)
"""

from __future__ import annotations

import json
import os
from typing import Any

Message = dict[str, Any]


def write_line(handle: int, message: Message) -> None:
    """`message` as one line into `handle`, a blocking pipe."""
    rest = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    while rest:
        rest = rest[os.write(handle, rest) :]


class LineReader:
    """The messages that have arrived on a pipe."""

    def __init__(self, handle: int) -> None:
        os.set_blocking(handle, False)
        self.handle = handle
        self._rest = b""

    def read(self) -> tuple[list[Message], bool]:
        """What has arrived since, and whether the writer is gone."""
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
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines], ended
