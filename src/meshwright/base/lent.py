"""Copies that another node lends, on the side of whoever reads them (the lender's: elastic/lending.py).

One line asks, {"key", "rank", "begin", "size"}; one line answers, {"size", "whole"}, and that many bytes follow: fewer than asked for at the
end of the memory, none where there is no such memory.
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.base.lines import message_of
from meshwright.base.link import NotAdmitted, enter
from meshwright.base.listener import LIMIT

AT, NOWHERE = "at:", "nowhere:"
"""How the place of a copy on another node begins, and the place of one that is lost with its node."""


def places_of(table: str) -> tuple[str, ...]:
    """Where the copies of all ranks lie, in order of rank, as the file `table` says; none where there is no such file."""
    return tuple(Path(table).read_text().splitlines()) if table else ()


class Lent:
    """The copies of one rank at `address`. Raises OSError when the node is gone, or the token is not that of the job."""

    def __init__(self, address: str, token: str, key: str, rank: int) -> None:
        self.key, self.rank = key, rank
        host, port = address.rsplit(":", 1)
        try:
            self._end, _ = enter(host, int(port), token, {})
        except NotAdmitted as error:
            raise OSError(str(error)) from None
        self._end.settimeout(None)
        self._lines = self._end.makefile("rb")

    def __del__(self) -> None:
        for part in (getattr(self, "_lines", None), getattr(self, "_end", None)):
            if part is not None:
                part.close()

    def fetch(self, begin: int, size: int) -> bytes:
        """Bytes of the memory from `begin`, fewer than `size` at its end."""
        found = bytearray(self._ask(begin, size))
        self._read(memoryview(found))
        return bytes(found)

    def fill(self, begin: int, out: memoryview) -> None:
        """As many bytes as `out` has. Raises OSError when there are fewer."""
        if self._ask(begin, len(out)) != len(out):
            raise ConnectionResetError("the node that lends these copies no longer has them")
        self._read(out)

    def _ask(self, begin: int, size: int) -> int:
        asked = {"key": self.key, "rank": self.rank, "begin": begin, "size": size}
        self._end.sendall(json.dumps(asked).encode() + b"\n")
        answer = self._lines.readline(LIMIT)
        if not answer:
            raise ConnectionResetError("the node that lends these copies is gone")
        return int(message_of(answer)["size"])

    def _read(self, out: memoryview) -> None:
        got = 0
        while got < len(out):
            read = self._lines.readinto(out[got:])  # type: ignore[attr-defined]
            if not read:
                raise ConnectionResetError("the node that lends these copies is gone")
            got += read
