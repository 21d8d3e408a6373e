"""Serves the store in which the ranks of a generation exchange addresses, for torch's TCPStore clients. A generation is
one start of all ranks of a job. The fork server (train/forkserver.py) runs the store.

Guarantees: a client must use the protocol of TCPStore, and its first key must begin with the prefix of its generation
(`store_key_prefix`). Before this key, the server answers only `check` and `ping`, and the limits
`MAX_UNAUTHENTICATED_BYTES` and `JOIN_TIMEOUT_SECONDS` apply (core/connection_listener.py). Prefixes are message
authentication codes of 128 bits. A known prefix, for example from the log of a failed rank, reveals nothing about the
prefixes of later generations. Each generation has separate values. The first client of a new generation ends the
connections of older generations and drops their values.

Torch's own server is not used for two reasons. First, it lists its keys to every client (`list_keys`), so that a secret
prefix would not protect them. Second, it accepts connections and values until file descriptors and memory run out. The
test tests/ranks/test_rendezvous_store.py runs torch's client against this server and fails if the protocol changes.

Source of the protocol: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (command codes). Numbers are in the byte order
of the machine. An 8-byte length precedes each key and value.
"""

from __future__ import annotations

import contextlib
import hmac
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum

from meshwright.core.connection_listener import MAX_UNAUTHENTICATED_BYTES, ConnectionRejected, InboundConnection
from meshwright.core.messages import Message

STORE_MAGIC = 0x3C85F7CE
MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS_PER_COMMAND = 2**16, 2**26, 2**17
"""Maximum number of bytes of a key, of bytes of a value, and of keys in one command."""

JOIN_TIMEOUT_SECONDS = 60.0
"""Seconds within which a client must send its first key. On a busy machine many ranks join at the same time."""

POLL_TIMEOUT_SECONDS = 60.0
"""Seconds for which a client that sends only `check` stays connected after each request. NCCL's watchdog sends such
requests, with a key that does not have the prefix of the generation."""


class StoreCommand(IntEnum):
    """The command codes of TCPStore. The first byte of a request is a code."""

    (
        validate,
        set,
        compare_set,
        get,
        add,
        check,
        wait,
        count,
        delete,
        append,
        multi_get,
        multi_set,
        cancel_wait,
        ping,
    ) = range(14)
    barrier = 18


REPLY_READY, REPLY_NOT_READY, REPLY_CANCELLED = b"\0", b"\1", b"\1"

RequestParser = Generator[int, bytes, bytes]
"""A generator that yields the number of bytes that it needs next, and then receives these bytes."""


def store_key_prefix(secret: str, generation: int) -> str:
    """Returns the prefix of all keys of a generation. Only a process that knows the secret of the training run can
    compute it.

    >>> store_key_prefix("a", 0) != store_key_prefix("a", 1) != store_key_prefix("b", 1)
    True
    """
    code = hmac.new(secret.encode(), f"meshwright store {generation}".encode(), "sha256").hexdigest()
    return f"{generation}.{code[:32]}"


@dataclass
class StoreValues:
    """The values of one generation. `waiting` maps a key to the clients that wait for this key."""

    generation: int
    values: dict[bytes, bytes] = field(default_factory=dict)
    waiting: dict[bytes, list[StoreClient]] = field(default_factory=dict)
    clients: set[StoreClient] = field(default_factory=set)

    def put(self, key: bytes, value: bytes) -> None:
        """Stores `value` and wakes the clients that wait for `key`."""
        self.values[key] = value
        for client in self.waiting.pop(key, ()):
            client.came(key)

    def add(self, key: bytes, number: int) -> int:
        """Adds `number` to the integer at `key` and returns the sum. A missing key counts as 0."""
        number += int(self.values.get(key, b"0"))
        self.put(key, b"%d" % number)
        return number


class RendezvousStore:
    """Stores the values of the newest generation. `secret` is the secret of the training run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.newest = StoreValues(-1)

    def client(self) -> StoreClient:
        """Returns the protocol handler for a new connection."""
        return StoreClient(self)

    def admit(self, client: StoreClient, key: bytes) -> StoreValues | None:
        """Returns the values of the generation to whose prefix `key` belongs, None if `key` has no valid prefix. If the
        generation is new, ends the connections of the older one.

        Raises: ConnectionRejected if the generation is older than the newest one.
        """
        prefix = key.removeprefix(b"/").partition(b"/")[0].decode(errors="replace")
        number = prefix.partition(".")[0]
        if not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        if not hmac.compare_digest(prefix.encode(), store_key_prefix(self._secret, int(number)).encode()):
            return None
        if int(number) < self.newest.generation:
            raise ConnectionRejected(Message("an older generation"))
        if int(number) > self.newest.generation:
            older, self.newest = self.newest, StoreValues(int(number))
            for other in list(older.clients):
                other.end_now()
        self.newest.clients.add(client)
        return self.newest


class StoreClient(InboundConnection):
    """One client connection in the protocol of torch's TCPStore."""

    patience = JOIN_TIMEOUT_SECONDS

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store
        self._own: StoreValues | None = None
        self._awaited: set[bytes] = set()
        self._arrived = bytearray()
        self._commands = self._obey()
        self._needed = next(self._commands)

    def receive(self, data: bytes) -> None:
        """Feeds `data` to the request parser. Raises ConnectionRejected if a key is too long."""
        self._arrived += data
        while len(self._arrived) >= self._needed:
            part = bytes(self._arrived[: self._needed])
            del self._arrived[: self._needed]
            self._needed = self._commands.send(part)
        if not self.is_admitted and max(self._needed, len(self._arrived)) > MAX_UNAUTHENTICATED_BYTES:
            raise ConnectionRejected(Message("a key that is too long"))

    def end_now(self) -> None:
        """Closes the connection, because a newer generation has begun."""
        self.listener.drop(self)

    def closed(self) -> None:
        """Removes this client from its generation."""
        if self._own is not None:
            self._own.clients.discard(self)

    def came(self, key: bytes) -> None:
        """Records that `key` now exists, and replies to the client if it waits for no further key."""
        if key in self._awaited:
            self._awaited.remove(key)
            if not self._awaited:
                self.send(REPLY_READY)

    # --- reading

    def _number(self, kind: str = "Q") -> Generator[int, bytes, int]:
        data = yield struct.calcsize(f"={kind}")
        return int(struct.unpack(f"={kind}", data)[0])

    def _bytes(self, most: int) -> RequestParser:
        size = yield from self._number()
        if size > most:
            raise ConnectionRejected(Message("{size:,} bytes in one message", size=size))
        return (yield size) if size else b""

    def _key(self) -> RequestParser:
        key = yield from self._bytes(MAX_KEY_BYTES)
        if self._own is None:
            self._own = self._store.admit(self, key)
            if self._own is not None:
                self.admit()
        return key

    def _keys(self) -> Generator[int, bytes, list[bytes]]:
        count = yield from self._number()
        if count > MAX_KEYS_PER_COMMAND:
            raise ConnectionRejected(Message("{count:,} keys in one message", count=count))
        keys = []
        for _ in range(count):
            keys.append((yield from self._key()))
            if not self.is_admitted and len(keys) > 1:
                raise ConnectionRejected(Message("several keys without the prefix of the run"))
        return keys

    # --- commands

    def _obey(self) -> Generator[int, bytes, None]:
        if (yield 1)[0] != StoreCommand.validate or (yield from self._number("I")) != STORE_MAGIC:
            raise ConnectionRejected(Message("no client of a store"))
        while True:
            code = (yield 1)[0]
            if code == StoreCommand.ping:
                self.send(struct.pack("=I", (yield from self._number("I"))))
            elif code == StoreCommand.check:
                yield from self._check()
            elif code in (StoreCommand.wait, StoreCommand.multi_get, StoreCommand.multi_set):
                yield from self._several(code)
            elif code in (StoreCommand.cancel_wait, StoreCommand.count):
                self._answer_without_key(code)
            else:
                yield from self._one(code)

    def _values(self) -> StoreValues:
        if self._own is None:
            raise ConnectionRejected(Message("a key without the prefix of the run"))
        return self._own

    def _check(self) -> Generator[int, bytes, None]:
        keys = yield from self._keys()
        known = (self._own or self._store.newest).values
        self.until = time.monotonic() + POLL_TIMEOUT_SECONDS
        self.send(REPLY_READY if all(key in known for key in keys) else REPLY_NOT_READY)

    def _answer_without_key(self, code: int) -> None:
        values = self._values()
        if code == StoreCommand.cancel_wait:
            self._awaited.clear()
            self.send(REPLY_CANCELLED)
        else:
            self.send(struct.pack("=q", len(values.values)))

    def _several(self, code: int) -> Generator[int, bytes, None]:
        if code == StoreCommand.multi_set:
            count = yield from self._number()
            for _ in range(count):
                yield from self._one(StoreCommand.set)
            return
        keys = yield from self._keys()
        values = self._values()
        if code == StoreCommand.wait:
            self._wait(keys)
        else:
            self.send(b"".join(_length_prefixed(values.values[key]) for key in keys))

    def _wait(self, keys: list[bytes]) -> None:
        values = self._values()
        self._awaited = {key for key in keys if key not in values.values}
        for key in self._awaited:
            values.waiting.setdefault(key, []).append(self)
        if not self._awaited:
            self.send(REPLY_READY)

    def _one(self, code: int) -> Generator[int, bytes, None]:
        with contextlib.suppress(ValueError):
            code = StoreCommand(code)
        if not isinstance(code, StoreCommand):
            raise ConnectionRejected(Message("command {code}, which is not known here", code=code))
        key = yield from self._key()
        values = self._values()
        if code == StoreCommand.set:
            values.put(key, (yield from self._bytes(MAX_VALUE_BYTES)))
        elif code == StoreCommand.append:
            values.put(key, values.values.get(key, b"") + (yield from self._bytes(MAX_VALUE_BYTES)))
        elif code == StoreCommand.compare_set:
            expected, wanted = (yield from self._bytes(MAX_VALUE_BYTES)), (yield from self._bytes(MAX_VALUE_BYTES))
            if values.values.get(key, b"") == expected:
                values.put(key, wanted)
            self.send(_length_prefixed(values.values.get(key, expected)))
        elif code == StoreCommand.get:
            self.send(_length_prefixed(values.values[key]))
        elif code == StoreCommand.add:
            self.send(struct.pack("=q", values.add(key, (yield from self._number("q")))))
        elif code == StoreCommand.delete:
            self.send(struct.pack("=q", values.values.pop(key, None) is not None))
        elif code == StoreCommand.barrier:
            world, done = (yield from self._number("q")), key + b"/done"
            if values.add(key, 1) >= world:
                values.put(done, b"")
            self._wait([done])
        else:
            raise ConnectionRejected(Message("command {code} in a place where it means nothing", code=code))


def _length_prefixed(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data
