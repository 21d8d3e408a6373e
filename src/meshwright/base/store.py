"""The store in which the ranks of a generation find each other's addresses: a server for the clients of torch's TCPStore, closed to everybody else.

Guarantees: a client is admitted by the first key that it names, which must begin with the prefix of its generation (`prefix_of`); until then nothing but
`check` is answered, and LIMIT bytes and JOINING seconds apply (base/listener.py). Prefixes are message authentication codes of 128 bits: one that is
known, such as from the log of a rank that failed, says nothing of a later one. Each generation has values of its own. The first client of a new
generation ends the connections of the older ones and drops their values.

Why not the server of torch: it lists its keys to whoever connects (`list_keys`), so a secret in them protects nothing; it accepts connections and values until
files and memory run out. tests/ranks/test_store.py runs torch's own client against this server and fails if its protocol changes.

Source of the protocol: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (codes of the commands); numbers are in the byte order of the machine, keys and values
are preceded by their length in 8 bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum

from meshwright.base.listener import LIMIT, Guest, Refused

MAGIC = 0x3C85F7CE
KEY, VALUE, KEYS = 2**16, 2**26, 2**17
"""Bytes of a key, bytes of a value, and keys of one command, at most."""

JOINING = 60.0
"""Seconds that a client gets to name its first key: ranks of a crowded machine join all at once."""

POLLING = 60.0
"""Seconds that a client which only checks stays after each check. NCCL's watch over other ranks does so, under a key without our prefix."""


class Command(IntEnum):
    """What a client sends first."""

    validate, set, compare_set, get, add, check, wait, count, delete, append, multi_get, multi_set, cancel_wait, ping = range(14)
    barrier = 18


READY, NOT_READY, CANCELLED = b"\0", b"\1", b"\1"

Reading = Generator[int, bytes, bytes]
"""Yields the number of bytes that it needs, and is sent them."""


def prefix_of(secret: str, generation: int) -> str:
    """The prefix of all keys of a generation, which only who knows the secret of the run can write.

    >>> prefix_of("a", 0) != prefix_of("a", 1) != prefix_of("b", 1)
    True
    """
    code = hmac.new(secret.encode(), f"meshwright store {generation}".encode(), "sha256").hexdigest()
    return f"{generation}.{code[:32]}"


@dataclass
class Values:
    """Those of one generation. `waiting`: clients by a key that they wait for."""

    generation: int
    values: dict[bytes, bytes] = field(default_factory=dict)
    waiting: dict[bytes, list[Client]] = field(default_factory=dict)
    clients: set[Client] = field(default_factory=set)

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        for client in self.waiting.pop(key, ()):
            client.came(key)

    def add(self, key: bytes, number: int) -> int:
        number += int(self.values.get(key, b"0"))
        self.put(key, b"%d" % number)
        return number


class Store:
    """The values of the newest generation. `secret`: of the run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.newest = Values(-1)

    def client(self) -> Client:
        return Client(self)

    def admit(self, client: Client, key: bytes) -> Values | None:
        """The values that a client may use which has named `key`; None if the key proves nothing."""
        prefix = key.removeprefix(b"/").partition(b"/")[0].decode(errors="replace")
        number = prefix.partition(".")[0]
        if not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        if not hmac.compare_digest(prefix.encode(), prefix_of(self._secret, int(number)).encode()):
            return None
        if int(number) < self.newest.generation:
            raise Refused("an older generation")
        if int(number) > self.newest.generation:
            older, self.newest = self.newest, Values(int(number))
            for other in list(older.clients):
                other.end_now()
        self.newest.clients.add(client)
        return self.newest


class Client(Guest):
    """One connection of a TCPStore."""

    patience = JOINING

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: Values | None = None
        self._awaited: set[bytes] = set()
        self._arrived = bytearray()
        self._commands = self._obey()
        self._needed = next(self._commands)

    def receive(self, data: bytes) -> None:
        self._arrived += data
        while len(self._arrived) >= self._needed:
            part = bytes(self._arrived[: self._needed])
            del self._arrived[: self._needed]
            self._needed = self._commands.send(part)
        if not self.is_admitted and max(self._needed, len(self._arrived)) > LIMIT:
            raise Refused("a key that is too long")

    def end_now(self) -> None:
        """Its generation is over."""
        self.listener.drop(self)

    def closed(self) -> None:
        if self._own is not None:
            self._own.clients.discard(self)

    def came(self, key: bytes) -> None:
        """A key that it waits for is there."""
        if key in self._awaited:
            self._awaited.remove(key)
            if not self._awaited:
                self.send(READY)

    # --- reading --------------------------------------------------------------------------------------------------------------

    def _number(self, kind: str = "Q") -> Generator[int, bytes, int]:
        data = yield struct.calcsize(f"={kind}")
        return int(struct.unpack(f"={kind}", data)[0])

    def _bytes(self, most: int) -> Reading:
        size = yield from self._number()
        if size > most:
            raise Refused(f"{size:,} bytes in one message")
        return (yield size) if size else b""

    def _key(self) -> Reading:
        key = yield from self._bytes(KEY)
        if self._own is None:
            self._own = self._store.admit(self, key)
            self.is_admitted = self._own is not None
        return key

    def _keys(self) -> Generator[int, bytes, list[bytes]]:
        count = yield from self._number()
        if count > KEYS:
            raise Refused(f"{count:,} keys in one message")
        keys = []
        for _ in range(count):
            keys.append((yield from self._key()))
            if not self.is_admitted and len(keys) > 1:
                raise Refused("several keys without the prefix of the run")
        return keys

    # --- commands -------------------------------------------------------------------------------------------------------------

    def _obey(self) -> Generator[int, bytes, None]:
        if (yield 1)[0] != Command.validate or (yield from self._number("I")) != MAGIC:
            raise Refused("no client of a store")
        while True:
            code = (yield 1)[0]
            if code == Command.ping:
                self.send(struct.pack("=I", (yield from self._number("I"))))
            elif code == Command.check:
                yield from self._check()
            elif code in (Command.wait, Command.multi_get, Command.multi_set):
                yield from self._several(code)
            elif code in (Command.cancel_wait, Command.count):
                self._answer_without_key(code)
            else:
                yield from self._one(code)

    def _values(self) -> Values:
        if self._own is None:
            raise Refused("a key without the prefix of the run")
        return self._own

    def _check(self) -> Generator[int, bytes, None]:
        keys = yield from self._keys()
        known = (self._own or self._store.newest).values
        self.until = time.monotonic() + POLLING
        self.send(READY if all(key in known for key in keys) else NOT_READY)

    def _answer_without_key(self, code: int) -> None:
        values = self._values()
        if code == Command.cancel_wait:
            self._awaited.clear()
            self.send(CANCELLED)
        else:
            self.send(struct.pack("=q", len(values.values)))

    def _several(self, code: int) -> Generator[int, bytes, None]:
        if code == Command.multi_set:
            count = yield from self._number()
            for _ in range(count):
                yield from self._one(Command.set)
            return
        keys = yield from self._keys()
        values = self._values()
        if code == Command.wait:
            self._wait(keys)
        else:
            self.send(b"".join(_vector(values.values[key]) for key in keys))

    def _wait(self, keys: list[bytes]) -> None:
        values = self._values()
        self._awaited = {key for key in keys if key not in values.values}
        for key in self._awaited:
            values.waiting.setdefault(key, []).append(self)
        if not self._awaited:
            self.send(READY)

    def _one(self, code: int) -> Generator[int, bytes, None]:
        with contextlib.suppress(ValueError):
            code = Command(code)
        if not isinstance(code, Command):
            raise Refused(f"command {code}, which is not known here")
        key = yield from self._key()
        values = self._values()
        if code == Command.set:
            values.put(key, (yield from self._bytes(VALUE)))
        elif code == Command.append:
            values.put(key, values.values.get(key, b"") + (yield from self._bytes(VALUE)))
        elif code == Command.compare_set:
            expected, wanted = (yield from self._bytes(VALUE)), (yield from self._bytes(VALUE))
            if values.values.get(key, b"") == expected:
                values.put(key, wanted)
            self.send(_vector(values.values.get(key, expected)))
        elif code == Command.get:
            self.send(_vector(values.values[key]))
        elif code == Command.add:
            self.send(struct.pack("=q", values.add(key, (yield from self._number("q")))))
        elif code == Command.delete:
            self.send(struct.pack("=q", values.values.pop(key, None) is not None))
        elif code == Command.barrier:
            world, done = (yield from self._number("q")), key + b"/done"
            if values.add(key, 1) >= world:
                values.put(done, b"")
            self._wait([done])
        else:
            raise Refused(f"command {code} in a place where it means nothing")


def _vector(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data
