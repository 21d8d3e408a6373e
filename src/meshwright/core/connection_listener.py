"""Accepts connections on every port that a process of a training run opens. core/secure_channel.py and
core/rendezvous_store.py define the protocols. The listener enforces limits and tolerates any input.

A connection is pending until the protocol admits it, usually because the peer has proved that it knows a secret.

Guarantees:
- At most `MAX_PENDING_CONNECTIONS` connections are pending and at most `MAX_OPEN_CONNECTIONS` are open. Both limits are
  lower if the process may open few files.
- A connection that is not admitted within `HANDSHAKE_SECONDS` is closed, even if it still sends bytes. Before admission
  it may send at most `MAX_UNAUTHENTICATED_BYTES` bytes.
- If too many connections are pending, the address with the most pending connections loses its oldest pending one.
- Connections do not block each other. An error in a connection ends only this connection.
- `accept` continues after any system error, including a lack of file descriptors.

One thread serves all connections of one listener.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from meshwright.core.background_thread import start_background_thread
from meshwright.core.messages import Message

HANDSHAKE_SECONDS = 15.0
"""Maximum seconds from accepting a connection to admitting it. On an overloaded machine a process may get no CPU for
several seconds."""

MAX_UNAUTHENTICATED_BYTES = 4096
"""Maximum number of bytes that a connection may send before it is admitted."""

MAX_PENDING_CONNECTIONS, MAX_OPEN_CONNECTIONS = 64, 2**15
"""Maximum number of pending connections of a listener, and maximum number of all open connections of a listener."""

ACCEPT_RETRY_SECONDS = 0.05
"""Seconds between a failure of `accept` and the next attempt."""

READ_BLOCK_BYTES = 1 << 16
"""Number of bytes that are read at a time."""


class ConnectionRejected(Exception):
    """Ends a connection. The message gives the reason."""


class InboundConnection:
    """A connection that a peer opened. A subclass implements a protocol: `greet` runs when the connection begins, and
    `receive` handles incoming data. The subclass calls `admit` once the peer has authenticated itself. All methods run
    in the thread of the listener."""

    is_admitted = False
    patience: float | None = None
    """Seconds after which a connection that is not admitted is closed. None means `HANDSHAKE_SECONDS`."""

    def begin(self, end: socket.socket, host: str, listener: ConnectionListener) -> None:
        """Starts the connection. The listener calls this method once, then `greet`. `host` is the address of the
        peer."""
        self.end, self.host, self.listener = end, host, listener
        self.began = time.monotonic()
        self.until = self.began + (HANDSHAKE_SECONDS if self.patience is None else self.patience)
        self.unsent = bytearray()

    def greet(self) -> None:
        """Sends the first message of this side."""

    def receive(self, data: bytes) -> None:
        """Handles incoming data.

        Raises: ConnectionRejected, or any other error, to end this connection.
        """
        raise NotImplementedError

    def closed(self) -> None:
        """Handles the end of the connection."""

    def admit(self) -> None:
        """Ends the limits of time and bytes, because the peer has authenticated itself."""
        self.is_admitted = True
        self.listener.mark_admitted(self)

    def send(self, data: bytes) -> None:
        """Sends without blocking. Bytes that do not fit in the socket buffer are sent later."""
        self.unsent += data
        self.listener.flush(self)

    def leave(self) -> socket.socket:
        """Transfers the socket, in blocking mode, to the caller. It counts as an open connection until the caller
        closes it."""
        return self.listener.release(self)


class ConnectionListener:
    """Accepts connections on the listening socket `end`. `guest` returns the object for a new connection. `report`
    receives a reason and the address of the peer when a connection is refused or breaks the protocol. For an error of
    the listener itself the address is ''.

    `expected`: at least this number of connections can always be open at the same time. The caller must have checked
    that the limit of open files allows so many (core/cgroup_limits.py)."""

    def __init__(
        self,
        end: socket.socket,
        guest: Callable[[], InboundConnection],
        report: Callable[[str, str], None] = lambda reason, host: None,
        expected: int = 0,
    ) -> None:
        self._end, self._guest, self._report = end, guest, report
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = MAX_OPEN_CONNECTIONS * 2 if files == resource.RLIM_INFINITY else files
        self.most_pending, self.most = (
            max(4, min(MAX_PENDING_CONNECTIONS, files // 8)),
            max(8, min(MAX_OPEN_CONNECTIONS, files // 2), expected + max(4, min(MAX_PENDING_CONNECTIONS, files // 8))),
        )
        end.setblocking(False)
        self._guests: dict[int, InboundConnection] = {}
        self._pending: dict[int, InboundConnection] = {}
        """Those of them that are not admitted, the oldest first, so that a flood costs little for each connection."""
        self._pending_of = Counter[str]()
        """The number of pending connections of each address."""
        self._released: list[socket.socket] = []
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(end, selectors.EVENT_READ)
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Serves connections in a separate thread with the name `name`."""
        self._thread = start_background_thread(name, self.run, lambda line: self._report(line, ""))

    def run(self) -> None:
        """Serves connections until `close` is called."""
        while not self._closed:
            oldest = next(iter(self._pending.values()), None)
            wait = 1.0 if oldest is None else min(1.0, oldest.until - time.monotonic())
            for key, events in self._waiting.select(max(0.0, wait)):
                if key.data is None:
                    self._accept()
                elif (guest := self._guests.get(key.fd)) is not None and guest is key.data:
                    self._serve(guest, events)
            self._drop_expired()
        for guest in list(self._guests.values()):
            self.drop(guest)
        self._waiting.close()
        self._end.close()

    def close(self) -> None:
        """Closes the port and all connections except those that `leave` has transferred to a caller."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        if self._thread is None:
            self._waiting.close()
            self._end.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _accept(self) -> None:
        try:
            end, address = self._end.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if self._closed:
                return
            self._report(Message("the system accepts no connection ({strerror})", strerror=error.strerror), "")
            if not self._drop_one(Message("too many connections")):
                time.sleep(ACCEPT_RETRY_SECONDS)
            return
        self._released = [other for other in self._released if other.fileno() >= 0]
        if len(self._guests) + len(self._released) >= self.most and not self._drop_one(Message("too many connections")):
            end.close()
            self._report(Message("too many connections"), str(address[0]))
            return
        if len(self._pending) >= self.most_pending:
            self._drop_one(Message("too many connections"))
        guest = self._guest()
        try:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.begin(end, str(address[0]), self)
            self._guests[end.fileno()] = self._pending[end.fileno()] = guest
            self._pending_of[guest.host] += 1
            self._waiting.register(end, selectors.EVENT_READ, guest)
            guest.greet()
        except OSError:  # the peer has already closed the connection
            self._forget(end)
            end.close()

    def _drop_expired(self) -> None:
        """Closes the pending connections that were not admitted in time."""
        now = time.monotonic()
        while self._pending and now > (guest := next(iter(self._pending.values()))).until:
            self.drop(guest, Message("not admitted within {now:.0f} s", now=now - guest.began))

    def _drop_one(self, reason: str) -> bool:
        """Finds the address with the most pending connections and closes its oldest pending connection. Returns False
        if there is no pending connection."""
        if not self._pending:
            return False
        [(host, _)] = self._pending_of.most_common(1)
        self.drop(next(guest for guest in self._pending.values() if guest.host == host), reason)
        return True

    def _serve(self, guest: InboundConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self.flush(guest)
            if events & selectors.EVENT_READ:
                data = guest.end.recv(READ_BLOCK_BYTES if guest.is_admitted else MAX_UNAUTHENTICATED_BYTES)
                if not data:
                    self.drop(guest)
                    return
                guest.receive(data)
        except BlockingIOError:
            return
        except OSError:
            self.drop(guest)
        except ConnectionRejected as error:
            self.drop(guest, str(error))
        except Exception as error:  # the input of one connection must not end other connections
            self.drop(guest, Message("a message that cannot be read ({name})", name=type(error).__name__))

    def flush(self, guest: InboundConnection) -> None:
        """Sends as many unsent bytes of `guest` as the socket buffer accepts. Only the listener's thread may call this
        method."""
        if self._guests.get(guest.end.fileno()) is not guest:
            return
        try:
            while guest.unsent:
                del guest.unsent[: guest.end.send(guest.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the peer has closed the connection, which the caller of `send` does not need to know
            self.drop(guest)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.unsent else 0)
        if self._waiting.get_key(guest.end).events != events:
            self._waiting.modify(guest.end, events, guest)

    def release(self, guest: InboundConnection) -> socket.socket:
        """Transfers the socket of `guest`, in blocking mode, to the caller."""
        self._forget(guest.end)
        self._released.append(guest.end)
        guest.end.setblocking(True)
        return guest.end

    def mark_admitted(self, guest: InboundConnection) -> None:
        """Records that `guest` is no longer pending."""
        if self._pending.get(guest.end.fileno()) is guest:
            del self._pending[guest.end.fileno()]
            self._pending_of[guest.host] -= 1
            if not self._pending_of[guest.host]:
                del self._pending_of[guest.host]

    def _forget(self, end: socket.socket) -> None:
        if (guest := self._guests.pop(end.fileno(), None)) is not None:
            self.mark_admitted(guest)
        with contextlib.suppress(KeyError, ValueError):
            self._waiting.unregister(end)

    def drop(self, guest: InboundConnection, reason: str = "") -> None:
        """Closes the connection `guest` and reports `reason`, unless it is ''. Only the listener's thread may call this
        method."""
        if self._guests.get(guest.end.fileno()) is guest:
            self._forget(guest.end)
            guest.closed()
        guest.end.close()
        if reason:
            self._report(reason, guest.host)
