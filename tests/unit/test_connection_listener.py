"""What arrives at a port of a run: floods, silence, single bytes, deep JSON and wrong proofs end their own connection
and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.core import connection_listener as limits
from meshwright.core.connection_listener import (
    MAX_UNAUTHENTICATED_BYTES,
    ConnectionListener,
    ConnectionRejected,
    InboundConnection,
)
from meshwright.core.ipc import MessageReader, parse_message
from meshwright.core.secure_channel import AuthenticationError, SecureListener, open_channel


def let_in(at: tuple[str, int]) -> dict[str, Any]:
    """Enters with the token as a node does, which tries again: on a busy machine any attempt may take too long. What
    the door says of itself."""
    while True:
        with contextlib.suppress(OSError):
            end, answer = open_channel(*at, "secret", {"name": "one"})
            end.close()
            return answer


class Port:
    """A door with the token `secret`, what came through it, and what was refused."""

    def __init__(self) -> None:
        self.came: list[dict[str, Any]] = []
        self.refused: list[tuple[str, str]] = []
        self.door = SecureListener(
            "127.0.0.1", 0, "secret", {"who": "leader"}, self.enter, lambda *why: self.refused.append(why)
        )
        self.at = (self.door.host, self.door.port)

    def enter(self, end: socket.socket, hello: dict[str, Any]) -> None:
        self.came.append(hello)
        end.close()

    def admits(self) -> bool:
        """Returns whether a client with the token is admitted."""
        before = len(self.came)
        answer = let_in(self.at)
        while len(self.came) == before:
            time.sleep(0.005)
        return answer == {"who": "leader"}

    def until_refused(self, why: str) -> None:
        while not any(why in reason for reason, _ in self.refused):
            time.sleep(0.005)


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.door.close()


def is_closed(end: socket.socket) -> bool:
    """Reads until the other end has closed."""
    with contextlib.suppress(ConnectionResetError):
        while end.recv(4096):
            pass
    return True


def test_a_flood_of_silent_connections_keeps_nobody_out_and_leaves_few_open(port: Port) -> None:
    silent = [socket.create_connection(port.at) for _ in range(400)]
    assert port.admits()
    port.until_refused("too many connections")
    for end in silent[: 400 - limits.MAX_PENDING_CONNECTIONS]:
        assert is_closed(end)
    assert all(host == "127.0.0.1" for _, host in port.refused)
    for end in silent:
        end.close()


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_a_silent_or_slow_connection_is_closed_by_the_total_time(port: Port, monkeypatch: Any, sent: bytes) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_connection(port.at) as end:
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.02):
                with contextlib.suppress(OSError):
                    end.send(sent)

        slow = threading.Thread(target=drip)
        slow.start()
        assert is_closed(end)
        over.set()
        slow.join()
    port.until_refused("not admitted within")
    assert port.admits()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 4000 + b"\n",
        b'{"a":' * 800 + b"1" + b"}" * 800 + b"\n",
        b'{"proof": "\xc3\xa9"}\n',
        b'{"proof": "\\ud800", "challenge": 1}\n',
        b'{"proof": {"a": 1}}\n',
        b"\xff\xfe\n",
        b"[1]\n",
        b"x" * (MAX_UNAUTHENTICATED_BYTES + 1),
    ],
)
def test_deep_json_and_strange_proofs_end_their_own_connection(port: Port, line: bytes) -> None:
    with socket.create_connection(port.at) as end:
        end.sendall(line)
        assert is_closed(end)
    assert port.admits()


def test_who_has_another_token_is_told_at_once_and_reported_with_its_address(port: Port) -> None:
    with pytest.raises(AuthenticationError, match="has another token") as caught:
        open_channel(*port.at, "other", {"name": "x"})
    assert caught.value.wrong_token and not port.came
    port.until_refused("another token")
    assert port.refused == [("another token", "127.0.0.1")]


def test_an_end_that_is_none_of_ours_does_not_count_as_a_wrong_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            end, _ = fake.accept()
            with end:
                end.sendall(b'{"challenge":"00"}\n')
                end.recv(4096)
                end.sendall(b'{"proof":"\xc3\xa9"}\n')

        says = threading.Thread(target=answer)
        says.start()
        with pytest.raises(AuthenticationError, match="does not belong to this job") as caught:
            open_channel(*fake.getsockname(), "secret", {})
        says.join()
    assert not caught.value.wrong_token


def test_who_enters_waits_no_longer_in_all_for_an_end_that_sends_single_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.core.secure_channel.HANDSHAKE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as fake:
        over = threading.Event()

        def drip() -> None:
            end, _ = fake.accept()
            with end:
                while not over.wait(0.02):
                    with contextlib.suppress(OSError):
                        end.send(b" ")

        slow = threading.Thread(target=drip)
        slow.start()
        with pytest.raises(TimeoutError):
            open_channel(*fake.getsockname(), "secret", {})
        over.set()
        slow.join()


class Echo(InboundConnection):
    """Is admitted by its first byte; `raise` ends it."""

    def receive(self, data: bytes) -> None:
        self.is_admitted = True
        if data == b"raise":
            raise KeyError("not caught by any protocol")
        if data == b"refuse":
            raise ConnectionRejected("refused on request")
        self.send(data)


class Broken(socket.socket):
    """Whose accept fails as often as it has errors."""

    errors: list[int] = []  # noqa: RUF012

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(), "injected")
        return super().accept()


@contextlib.contextmanager
def listening(end: socket.socket) -> Iterator[tuple[tuple[str, int], list[str]]]:
    reasons: list[str] = []
    found = ConnectionListener(end, Echo, lambda reason, host: reasons.append(reason))
    found.start("echo")
    try:
        yield end.getsockname(), reasons
    finally:
        found.close()


def echoes(at: tuple[str, int]) -> bool:
    with socket.create_connection(at) as end:
        end.sendall(b"word")
        return end.recv(100) == b"word"


def test_accept_goes_on_after_every_error_of_the_system() -> None:
    kinds = [
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EPERM,
        errno.EINVAL,
    ]
    end = Broken()
    end.bind(("127.0.0.1", 0))
    end.listen()
    Broken.errors = list(kinds)
    with listening(end) as (at, reasons):
        assert echoes(at) and not Broken.errors
        assert len([reason for reason in reasons if "accepts no connection" in reason]) == len(kinds)


def test_whatever_a_protocol_raises_ends_its_own_connection() -> None:
    with listening(socket.create_server(("127.0.0.1", 0))) as (at, reasons):
        with socket.create_connection(at) as other:
            for word in (b"raise", b"refuse"):
                with socket.create_connection(at) as end:
                    end.sendall(word)
                    assert is_closed(end)
            other.sendall(b"still")
            assert other.recv(100) == b"still"
        assert reasons == ["a message that cannot be read (KeyError)", "refused on request"]


def test_one_that_does_not_read_delays_nobody_and_gets_all_of_it_later() -> None:
    with listening(socket.create_server(("127.0.0.1", 0))) as (at, _), socket.create_connection(at) as end:
        sent = os.urandom(1 << 24)
        writer = threading.Thread(target=end.sendall, args=(sent,))
        writer.start()
        assert echoes(at)
        got = bytearray()
        while len(got) < len(sent):
            got += end.recv(1 << 20)
        writer.join()
        assert bytes(got) == sent


def test_the_address_with_most_connections_loses_its_oldest_first() -> None:
    with listening(socket.create_server(("127.0.0.1", 0))) as (at, _):
        lone = socket.create_connection(at, source_address=("127.0.0.2", 0))
        many = [socket.create_connection(at) for _ in range(3 * limits.MAX_PENDING_CONNECTIONS)]
        assert is_closed(many[0])
        lone.sendall(b"word")
        assert lone.recv(100) == b"word"
        for end in (lone, *many):
            end.close()


FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from meshwright.core.secure_channel import SecureListener
came = []
door = SecureListener("127.0.0.1", 0, "secret", {}, lambda end, hello: (came.append(hello), end.close()))
print(door.port, flush=True)
sys.stdin.readline()
held = []
while True:
    try:
        held.append(open("/dev/null"))
    except OSError:
        break
print("full", flush=True)
sys.stdin.readline()
held.clear()
print("free", flush=True)
while not came:
    time.sleep(0.01)
print("came", flush=True)
"""


def test_a_process_without_a_file_left_listens_on_and_admits_again() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        at = ("127.0.0.1", int(process.stdout.readline()))
        say = lambda: process.stdin.write("\n")  # type: ignore[union-attr]
        say()
        assert process.stdout.readline() == "full\n"
        silent = [socket.create_connection(at) for _ in range(40)]
        say()
        assert process.stdout.readline() == "free\n"
        let_in(at)
        for other in silent:
            other.close()
        assert process.stdout.readline() == "came\n"


def test_a_listener_keeps_to_fewer_connections_where_few_files_may_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with socket.create_server(("127.0.0.1", 0)) as end:
            found = ConnectionListener(end, Echo)
            assert (found.most_pending, found.most) == (32, 128)
            found.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_line_of_a_peer_is_limited_in_length_and_depth() -> None:
    ours, theirs = os.pipe()
    reader = MessageReader(ours, longest=100)
    os.write(theirs, b'{"a":1}\n' + b"x" * 200)
    with pytest.raises(ValueError, match="too long"):
        reader.read()
    for end in (ours, theirs):
        os.close(end)
    assert parse_message(json.dumps({"a": [[[1]]]}).encode()) == {"a": [[[1]]]}
    for deep in (b"[" * 100_000, b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"):
        with pytest.raises(ValueError, match="deep"):
            parse_message(deep)
