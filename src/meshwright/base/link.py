"""JSON lines between the machines of one job: who may speak is proved first, by the job's token. No pickle, nothing is ever executed.

Promises: a door listens on the one address that it was given; both ends prove that they know the token (HMAC-SHA256 over the other's fresh
challenge) before anything else is read, within HANDSHAKE seconds and LIMIT bytes, and the token itself never travels; a reader never
blocks. What is said afterwards is neither hidden nor signed: the network between the machines of a job has to be a private one, as for NCCL and gloo.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from meshwright.base.errors import MeshwrightError
from meshwright.base.lines import LineReader, Message

HANDSHAKE = 5.0
"""Seconds for both proofs."""

LIMIT = 4096
"""Bytes of a line before both proofs are seen."""

PATIENCE = 10.0
"""Seconds that a line may wait for room on its way."""

UNANSWERED = 15_000
"""Milliseconds after which bytes that nobody acknowledges break the connection."""

_TCP_USER_TIMEOUT = 18


class NotAdmitted(MeshwrightError):
    """The other end does not know the job's token, or is none of ours."""


class Link:
    """One end of a connection over which both have proved themselves. `hello` is what the other end said of itself."""

    def __init__(self, end: socket.socket, hello: Message) -> None:
        self.end, self.hello = end, hello
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform.startswith("linux"):
            end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, UNANSWERED)
        self._reader = LineReader(end.fileno())
        self._speaks = threading.Lock()

    @property
    def handle(self) -> int:
        return self.end.fileno()

    def send(self, message: Message) -> None:
        """From any thread. Raises OSError when the other end is gone, or does not read for PATIENCE seconds."""
        rest = memoryview(_line(message))
        with self._speaks:
            while rest:
                try:
                    rest = rest[self.end.send(rest) :]
                except BlockingIOError:
                    if not select.select([], [self.end], [], PATIENCE)[1]:
                        raise TimeoutError("the other end does not read") from None

    def read(self) -> tuple[list[Message], bool]:
        """What has arrived since, and whether the other end is gone."""
        try:
            return self._reader.read()
        except (OSError, ValueError):
            return [], True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


class Door:
    """Listens at `host` and hands each end that has proved itself to `enter`, from a thread of its own."""

    def __init__(self, host: str, port: int, token: str, me: Message, enter: Callable[[socket.socket, Message], None]) -> None:
        """`me`: what is said of this end. Raises OSError when the address is not of this machine or the port is taken."""
        self._token, self._me, self._enter = token, me, enter
        self._listener = socket.create_server((host, port))
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(end,), name="handshake", daemon=True).start()

    def _admit(self, end: socket.socket) -> None:
        try:
            end.settimeout(HANDSHAKE)
            challenge = secrets.token_hex(16)
            end.sendall(_line({"challenge": challenge}))
            hello = _first_line(end)
            if not hmac.compare_digest(str(hello.pop("proof", "")), _proof(self._token, "enters", challenge)):
                end.sendall(_line({"refused": "another token"}))
                raise NotAdmitted("another token")
            end.sendall(_line({"proof": _proof(self._token, "admits", str(hello.pop("challenge", ""))), **self._me}))
            self._enter(end, hello)
        except (OSError, ValueError, NotAdmitted):
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def enter(host: str, port: int, token: str, me: Message) -> tuple[socket.socket, Message]:
    """A connection to a door, and what it says of itself. Raises OSError when nobody is there, NotAdmitted when the tokens differ."""
    end = socket.create_connection((host, port), timeout=HANDSHAKE)
    try:
        challenge = secrets.token_hex(16)
        asked = str(_first_line(end).get("challenge", ""))
        end.sendall(_line({"proof": _proof(token, "enters", asked), "challenge": challenge, **me}))
        answer = _first_line(end)
        if not hmac.compare_digest(str(answer.pop("proof", "")), _proof(token, "admits", challenge)):
            raise NotAdmitted(f"{host}:{port} {'has another token' if 'refused' in answer else 'is none of this job'}")
    except (OSError, ValueError, NotAdmitted):
        end.close()
        raise
    return end, answer


def interface_of(host: str) -> str:
    """The name of the network interface of this machine that has the address of `host`; empty where none has.

    >>> interface_of("127.0.0.1") in ("lo", "lo0", "")
    True
    """
    import psutil

    address = socket.gethostbyname(host)
    found = (name for name, addresses in psutil.net_if_addrs().items() for entry in addresses if entry.address == address)
    return next(found, "")


def meeting(address: str) -> dict[str, str]:
    """What gloo and NCCL are told where nobody has told them: the network interface that has this machine's `address` of the job. gloo would take the one that
    the host's own name resolves to, often loopback, NCCL the first one that is up. Ranks of one machine alone leave NCCL its choice.

    >>> meeting("127.0.0.1") in ({"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo0"})
    True
    """
    name, alone = interface_of(address), ip_address(socket.gethostbyname(address)).is_loopback
    gloo = {"GLOO_SOCKET_IFNAME": name or ("lo0" if sys.platform == "darwin" else "lo")}
    return gloo if alone or not name else gloo | {"NCCL_SOCKET_IFNAME": f"={name}"}


def address_towards(host: str, port: int) -> str:
    """The address by which `host` sees this machine. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _proof(token: str, deed: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"meshwright {deed} {challenge}".encode(), "sha256").hexdigest()


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _first_line(end: socket.socket) -> dict[str, Any]:
    """One line of at most LIMIT bytes, and not a byte more. Raises ValueError when it is no object."""
    line = b""
    while not line.endswith(b"\n"):
        byte = end.recv(1)
        if not byte or len(line) > LIMIT:
            raise ValueError("no line")
        line += byte
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def token_of(environment: dict[str, str] | os._Environ[str], path: str, write: bool) -> str:
    """The job's secret: MESHWRIGHT_TOKEN, or the file at `path`, which only its owner can read and which the leader writes. Empty where there is none yet."""
    if environment.get(TOKEN):
        return environment[TOKEN]
    if write:
        token = secrets.token_hex(32)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(token)
        return token
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


TOKEN = "MESHWRIGHT_TOKEN"
