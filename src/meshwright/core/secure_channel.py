"""Exchanges JSON lines between the machines of one job, after both ends have proved that they know the job's token. The
supervisors of several nodes communicate over it, and snapshots are read over it.

Guarantees: a listener uses only the given address, within the limits of core/connection_listener.py. Both ends prove
that they know the token before anything else is read. The proof is an HMAC-SHA256 over a fresh challenge of the peer.
The token itself is never sent. `SecureChannel.read` never blocks. A line has at most `MAX_MESSAGE_BYTES` bytes. Nothing
is pickled, and received data is never executed.

Messages after the handshake are neither encrypted nor signed. The network between the machines must be private, as for
NCCL and gloo.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from meshwright.core.connection_listener import (
    HANDSHAKE_SECONDS,
    MAX_UNAUTHENTICATED_BYTES,
    ConnectionListener,
    ConnectionRejected,
    InboundConnection,
)
from meshwright.core.errors import MeshwrightError
from meshwright.core.ipc import IpcMessage, MessageReader, message_line, parse_message, wait_writable
from meshwright.core.messages import Message
from meshwright.core.storage import failures_as_one_line, read_file

TOKEN_MISMATCH = "another token"

CONNECT_TIMEOUT_SECONDS = 5.0
"""Seconds within which a machine must accept a connection."""

MAX_MESSAGE_BYTES = 2**26
"""Maximum number of bytes of a line."""

SEND_TIMEOUT_SECONDS = 10.0
"""Maximum number of seconds for which sending may block while the peer reads nothing."""

ACK_TIMEOUT_MILLISECONDS = 15_000
"""Milliseconds after which unacknowledged bytes break the connection."""

KEEPALIVE_SECONDS = 5
"""Seconds without data after which the system sends a keepalive probe, and seconds between probes. Three probes without
an answer break the connection."""

_TCP_USER_TIMEOUT = 18


class AuthenticationError(MeshwrightError):
    """Reports that the peer does not know the job's token, or is not a Meshwright process. `wrong_token`: whether the
    peer rejected the token of this process."""

    def __init__(self, words: str, wrong_token: bool = False) -> None:
        super().__init__(words)
        self.wrong_token = wrong_token


class SecureChannel:
    """One end of an authenticated connection. `end` is the socket, and `hello` is the greeting of the peer."""

    def __init__(self, end: socket.socket, hello: IpcMessage) -> None:
        self.end, self.hello = end, hello
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform.startswith("linux"):
            end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, ACK_TIMEOUT_MILLISECONDS)
        self._reader = MessageReader(end.fileno(), MAX_MESSAGE_BYTES)
        self._speaks = threading.Lock()

    @property
    def handle(self) -> int:
        """Returns the file descriptor of the socket."""
        return self.end.fileno()

    def send(self, message: IpcMessage) -> None:
        """Sends `message` from any thread.

        Raises: OSError if the peer has closed the connection, or does not read for `SEND_TIMEOUT_SECONDS`.
        """
        self.write(message_line(message))

    def write(self, line: bytes) -> None:
        """Sends the encoded message `line` from any thread. A caller can so encode a message once for several peers.

        Raises: OSError as `send` does. The connection is then shut down.
        """
        rest = memoryview(line)
        with self._speaks:
            try:
                while rest:
                    rest = self._send(rest)
            except OSError:  # the line may be incomplete, so no further line may follow
                with contextlib.suppress(OSError):
                    self.end.shutdown(socket.SHUT_RDWR)
                raise

    def _send(self, rest: memoryview) -> memoryview:
        try:
            return rest[self.end.send(rest) :]
        except BlockingIOError:
            if not wait_writable(SEND_TIMEOUT_SECONDS, self.end.fileno()):
                raise TimeoutError("the other end does not read") from None
        return rest

    def read(self) -> tuple[list[IpcMessage], bool]:
        """Returns the messages that have arrived since the last call, and whether the connection has ended. An invalid
        message counts as the end of the connection."""
        try:
            return self._reader.read()
        except (OSError, ValueError):
            return [], True

    def close(self) -> None:
        """Shuts the connection down in both directions and closes the socket."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def detect_dead_peer(end: socket.socket, send_timeout: float) -> None:
    """Makes `end` a blocking socket whose reads and writes fail if the machine of the peer does not answer. Writes also
    fail if the peer does not read for `send_timeout` seconds."""
    end.settimeout(None)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(send_timeout), 0))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, ACK_TIMEOUT_MILLISECONDS)


class SecureListener:
    """Listens at `host` and passes each authenticated connection to `enter`, from a separate thread."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        me: IpcMessage,
        enter: Callable[[socket.socket, IpcMessage], None],
        refused: Callable[[str, str], None] = lambda reason, host: None,
        expected: int = 0,
    ) -> None:
        """Opens the port, or a free one if `port` is 0. `me` is the greeting of this end. `refused` receives the reason
        and the address when a connection is refused. `expected`: at least this number of connections can always be open
        at the same time.

        Raises: OSError if the address does not belong to this machine or the port is in use.
        """
        end = socket.create_server((host, port))
        self.host, self.port = end.getsockname()[:2]
        self._listener = ConnectionListener(end, lambda: _PendingHandshake(token, me, enter), refused, expected)
        self._listener.start("door")

    def close(self) -> None:
        """Closes the port."""
        self._listener.close()


class _PendingHandshake(InboundConnection):
    """A connection to a listener that is not yet authenticated."""

    def __init__(self, token: str, me: IpcMessage, enter: Callable[[socket.socket, IpcMessage], None]) -> None:
        self._token, self._me, self._enter = token, me, enter
        self._challenge, self._line = secrets.token_hex(16), b""

    def greet(self) -> None:
        self.send(message_line({"challenge": self._challenge}))

    def receive(self, data: bytes) -> None:
        self._line += data
        if len(self._line) > MAX_UNAUTHENTICATED_BYTES:
            raise ConnectionRejected(Message("a first line that is too long"))
        if not self._line.endswith(b"\n"):
            return
        hello = parse_message(self._line)
        if not _is_valid_mac(hello.pop("proof", ""), self._token, "enters", self._challenge):
            self.send(message_line({"refused": TOKEN_MISMATCH}))
            raise ConnectionRejected(TOKEN_MISMATCH)
        self.send(
            message_line({"proof": _handshake_mac(self._token, "admits", str(hello.pop("challenge", ""))), **self._me})
        )
        if self.unsent:
            raise ConnectionRejected(Message("it does not read"))
        self._enter(self.leave(), hello)


def open_channel(host: str, port: int, token: str, me: IpcMessage) -> tuple[socket.socket, IpcMessage]:
    """Connects to a listener. `me` is the greeting of this end. Returns the socket and the greeting of the listener.

    Raises: OSError if there is no listener at the address or it does not answer in time, ValueError if it does not send
    JSON lines, AuthenticationError if the tokens differ or the listener does not belong to this job.
    """
    until = time.monotonic() + HANDSHAKE_SECONDS
    end = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS)
    try:
        challenge = secrets.token_hex(16)
        theirs = str(_read_first_line(end, until).get("challenge", ""))
        end.sendall(message_line({"proof": _handshake_mac(token, "enters", theirs), "challenge": challenge, **me}))
        answer = _read_first_line(end, until)
        if "refused" in answer:
            raise AuthenticationError(
                Message("{host}:{port} has another token", host=host, port=port), wrong_token=True
            )
        if not _is_valid_mac(answer.pop("proof", ""), token, "admits", challenge):
            raise AuthenticationError(Message("{host}:{port} does not belong to this job", host=host, port=port))
    except (OSError, ValueError, AuthenticationError):
        end.close()
        raise
    return end, answer


def network_interface_of(host: str) -> str:
    """Returns the name of the network interface of this machine that has the address of `host`, '' if there is none.

    >>> network_interface_of("127.0.0.1") in ("lo", "lo0", "")
    True
    """
    import psutil

    address = socket.gethostbyname(host)
    found = (
        name for name, addresses in psutil.net_if_addrs().items() for entry in addresses if entry.address == address
    )
    return next(found, "")


def collective_environment(address: str) -> dict[str, str]:
    """Returns the environment variables that make gloo and NCCL use the network interface with `address`, the address
    of this machine in the job.

    By default gloo uses the interface to which the host name resolves, which is often loopback. NCCL uses the first
    interface that is up. If `address` is loopback, all ranks are on one machine, and NCCL keeps its default.

    >>> collective_environment("127.0.0.1") in ({"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo0"})
    True
    """
    name, single = network_interface_of(address), ip_address(socket.gethostbyname(address)).is_loopback
    gloo = {"GLOO_SOCKET_IFNAME": name or ("lo0" if sys.platform == "darwin" else "lo")}
    return gloo if single or not name else gloo | {"NCCL_SOCKET_IFNAME": f"={name}"}


def local_address_towards(host: str, port: int) -> str:
    """Returns the address that this machine uses for packets to `host`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _handshake_mac(token: str, purpose: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"meshwright {purpose} {challenge}".encode(), "sha256").hexdigest()


def _is_valid_mac(said: Any, token: str, purpose: str, challenge: str) -> bool:
    return hmac.compare_digest(str(said).encode(), _handshake_mac(token, purpose, challenge).encode())


def _read_first_line(end: socket.socket, until: float) -> IpcMessage:
    """Reads one line of at most `MAX_UNAUTHENTICATED_BYTES` bytes before the time `until`. Reads no byte after the
    line.

    Raises: ValueError if there is no line or it is not a JSON object, TimeoutError if it is not complete in time.
    """
    line = b""
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole line in time")
        end.settimeout(left)
        byte = end.recv(1)
        if not byte or len(line) > MAX_UNAUTHENTICATED_BYTES:
            raise ValueError("no line")
        line += byte
    return parse_message(line)


def read_token(path: Path) -> str:
    """Returns the token that the head node has written to the file `path` of the run folder, '' if there is no file.

    Raises: StorageFailed if the file cannot be read, or is not one line of ASCII text.
    """
    with failures_as_one_line(path):
        try:
            token = read_file(path, most=MAX_UNAUTHENTICATED_BYTES).strip()
        except FileNotFoundError:
            return ""
        if not token.isascii() or not token.decode("ascii").isprintable():
            raise OSError(errno.EINVAL, "holds no token", str(path))
    return token.decode("ascii")


TOKEN_VARIABLE = "MESHWRIGHT_TOKEN"
"""The environment variable with the token of a job. The launcher of the nodes sets it."""
