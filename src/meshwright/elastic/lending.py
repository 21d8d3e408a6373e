"""Lends the copies that a node holds to the ranks of other nodes: bytes of memory that outlives ranks, read over a link, never written.

One line asks, {"key", "rank", "begin", "size"}; one line answers, {"size", "whole"}, and that many bytes follow: fewer than asked for at the
end of the memory, none where there is no such memory. `whole` is the size of all of it. Who may ask is proved at the door (base/link.py).
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable

from meshwright.base.lines import Message, message_of
from meshwright.base.link import Door
from meshwright.base.listener import LIMIT

Find = Callable[[str, int], int | None]
"""The file of the copies of a rank, by the key of its holdings, opened once more for whoever asks, who closes it: its own may be closed at any time."""


class Lender:
    """Lends what `find` finds, at an address of its own."""

    def __init__(self, host: str, token: str, find: Find) -> None:
        self._find = find
        self._door = Door(host, 0, token, {}, self._serve)
        self.address = f"{self._door.host}:{self._door.port}"

    def _serve(self, end: socket.socket, _: Message) -> None:
        threading.Thread(target=self._lend, args=(end,), name="lender", daemon=True).start()

    def _lend(self, end: socket.socket) -> None:
        end.settimeout(None)
        try:
            with end, end.makefile("rb") as lines:
                while line := lines.readline(LIMIT):
                    self._answer(end, message_of(line))
        except (OSError, ValueError, KeyError, TypeError):
            return  # whoever asked is gone, or is none of ours

    def _answer(self, end: socket.socket, asked: Message) -> None:
        file = self._find(str(asked["key"]), int(asked["rank"]))
        try:
            whole = os.fstat(file).st_size if file is not None else 0
            begin = int(asked["begin"])
            size = max(0, min(int(asked["size"]), whole - begin)) if begin >= 0 else 0
            end.sendall(json.dumps({"size": size, "whole": whole}).encode() + b"\n")
            while size and file is not None:
                sent = os.sendfile(end.fileno(), file, begin, size)
                begin, size = begin + sent, size - sent
        finally:
            if file is not None:
                os.close(file)

    def close(self) -> None:
        self._door.close()
