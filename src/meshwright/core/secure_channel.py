"""JSON lines between the machines of one job: who may speak is proved first, by the job's token. No pickle, nothing is
ever executed.

Promises: a door listens on the one address that it was given, within the limits of core/connection_listener.py; both
ends prove that they know the token
(HMAC-SHA256 over the other's fresh challenge) before anything else is read, and the token itself never travels; a
reader never blocks; a line
has LONGEST bytes at most. What is said afterwards is neither hidden nor signed: the network between the machines of a
job has to be a private one, as for NCCL and gloo.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
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
from meshwright.core.ipc import IpcMessage, MessageReader, parse_message

TOKEN_MISMATCH = "another token"

CONNECT_TIMEOUT_SECONDS = 5.0
"""Seconds that a machine gets to answer at all."""

MAX_MESSAGE_BYTES = 2**26
"""Bytes of a line."""

SEND_TIMEOUT_SECONDS = 10.0
"""Seconds that a line may wait for room on its way."""

ACK_TIMEOUT_MILLISECONDS = 15_000
"""Milliseconds after which bytes that nobody acknowledges break the connection."""

_TCP_USER_TIMEOUT = 18


class AuthenticationError(MeshwrightError):
    """The other end does not know the job's token, or is none of ours. `wrong_token`: it refused ours."""

    def __init__(self, words: str, wrong_token: bool = False) -> None:
        super().__init__(words)
        self.wrong_token = wrong_token


class SecureChannel:
    """One end of a connection over which both have proved themselves. `hello` is what the other end said of itself."""

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
        return self.end.fileno()

    def send(self, message: IpcMessage) -> None:
        """From any thread. Raises OSError when the other end is gone, or does not read for PATIENCE seconds."""
        self.write(encode_message(message))

    def write(self, line: bytes) -> None:
        """`send` of a line that is ready, as several ends get it."""
        rest = memoryview(line)
        with self._speaks:
            while rest:
                try:
                    rest = rest[self.end.send(rest) :]
                except BlockingIOError:
                    if not select.select([], [self.end], [], SEND_TIMEOUT_SECONDS)[1]:
                        raise TimeoutError("the other end does not read") from None

    def read(self) -> tuple[list[IpcMessage], bool]:
        """What has arrived since, and whether the other end is gone."""
        try:
            return self._reader.read()
        except (OSError, ValueError):
            return [], True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


class SecureListener:
    """Listens at `host` and hands each end that has proved itself to `enter`, from a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        me: IpcMessage,
        enter: Callable[[socket.socket, IpcMessage], None],
        refused: Callable[[str, str], None] = lambda reason, host: None,
    ) -> None:
        """`me`: what is said of this end; `refused` gets the reason and the address when a connection is refused.
        Raises OSError when the
        address is not of this machine or the port is taken."""
        end = socket.create_server((host, port))
        self.host, self.port = end.getsockname()[:2]
        self._listener = ConnectionListener(end, lambda: _PendingHandshake(token, me, enter), refused)
        self._listener.start("door")

    def close(self) -> None:
        self._listener.close()


class _PendingHandshake(InboundConnection):
    """One connection to a door, until it has proved itself."""

    def __init__(self, token: str, me: IpcMessage, enter: Callable[[socket.socket, IpcMessage], None]) -> None:
        self._token, self._me, self._enter = token, me, enter
        self._challenge, self._line = secrets.token_hex(16), b""

    def greet(self) -> None:
        self.send(encode_message({"challenge": self._challenge}))

    def receive(self, data: bytes) -> None:
        self._line += data
        if len(self._line) > MAX_UNAUTHENTICATED_BYTES:
            raise ConnectionRejected("a first line that is too long")
        if not self._line.endswith(b"\n"):
            return
        hello = parse_message(self._line)
        if not _is_valid_mac(hello.pop("proof", ""), self._token, "enters", self._challenge):
            self.send(encode_message({"refused": TOKEN_MISMATCH}))
            raise ConnectionRejected(TOKEN_MISMATCH)
        self.send(
            encode_message(
                {"proof": _handshake_mac(self._token, "admits", str(hello.pop("challenge", ""))), **self._me}
            )
        )
        if self.unsent:
            raise ConnectionRejected("it does not read")
        self._enter(self.leave(), hello)


def open_channel(host: str, port: int, token: str, me: IpcMessage) -> tuple[socket.socket, IpcMessage]:
    """A connection to a door, and what it says of itself. Raises OSError when nobody is there, NotAdmitted when the
    tokens differ."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    end = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS)
    try:
        challenge = secrets.token_hex(16)
        theirs = str(_read_first_line(end, until).get("challenge", ""))
        end.sendall(encode_message({"proof": _handshake_mac(token, "enters", theirs), "challenge": challenge, **me}))
        answer = _read_first_line(end, until)
        if "refused" in answer:
            raise AuthenticationError(f"{host}:{port} has another token", wrong_token=True)
        if not _is_valid_mac(answer.pop("proof", ""), token, "admits", challenge):
            raise AuthenticationError(f"{host}:{port} is none of this job")
    except (OSError, ValueError, AuthenticationError):
        end.close()
        raise
    return end, answer


def network_interface_of(host: str) -> str:
    """The name of the network interface of this machine that has the address of `host`; empty where none has.

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
    """What gloo and NCCL are told where nobody has told them: the network interface that has this machine's `address`
    of the job. gloo would take the one that
    the host's own name resolves to, often loopback, NCCL the first one that is up. Ranks of one machine alone leave
    NCCL its choice.

    >>> collective_environment("127.0.0.1") in ({"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo0"})
    True
    """
    name, alone = network_interface_of(address), ip_address(socket.gethostbyname(address)).is_loopback
    gloo = {"GLOO_SOCKET_IFNAME": name or ("lo0" if sys.platform == "darwin" else "lo")}
    return gloo if alone or not name else gloo | {"NCCL_SOCKET_IFNAME": f"={name}"}


def local_address_towards(host: str, port: int) -> str:
    """The address by which `host` sees this machine. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _handshake_mac(token: str, deed: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"meshwright {deed} {challenge}".encode(), "sha256").hexdigest()


def encode_message(message: IpcMessage) -> bytes:
    """`message` as it travels."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _is_valid_mac(said: Any, token: str, deed: str, challenge: str) -> bool:
    return hmac.compare_digest(str(said).encode(), _handshake_mac(token, deed, challenge).encode())


def _read_first_line(end: socket.socket, until: float) -> IpcMessage:
    """One line of at most LIMIT bytes, and not a byte more, before `until`. Raises ValueError when it is no object."""
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
    """The secret that the node which leads has written into the run folder; empty where there is none yet."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


TOKEN_VARIABLE = "MESHWRIGHT_TOKEN"
"""The variable with the secret of a job, where whoever starts its nodes gives them one."""
