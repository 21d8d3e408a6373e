"""The store of a run: torch's own client is served, and nobody without the prefix of a generation reads, writes or
holds up anything."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from meshwright.core.rendezvous_store import STORE_MAGIC, store_key_prefix

SECRET = "0123456789abcdef0123456789abcdef"
SERVER = """
import socket, sys
from meshwright.core.connection_listener import ConnectionListener
from meshwright.core.rendezvous_store import RendezvousStore
end = socket.create_server(("127.0.0.1", 0))
print(end.getsockname()[1], flush=True)
ConnectionListener(end, RendezvousStore(sys.argv[1]).client).run()
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a store in a process of its own: some calls of torch's client hold the interpreter's lock while they wait."""
    with subprocess.Popen([sys.executable, "-c", SERVER, SECRET], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def raw(port: int, seconds: float = 60.0) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=seconds))


def member(port: int, generation: int) -> PrefixStore:
    return PrefixStore(store_key_prefix(SECRET, generation), raw(port))


def test_every_command_of_a_client_of_torch_is_answered_as_torchs_own_server_does(port: int) -> None:
    """Fails where a torch speaks another protocol."""
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = []
    for store in (member(port, 1), PrefixStore("x", raw(own.port))):
        said: list[object] = [
            store.set("a", "1"),
            store.get("a"),
            store.add("n", 5),
            store.add("n", -7),
            store.get("n"),
        ]
        said += [store.check(["a"]), store.check(["a", "b"])]
        said += [store.compare_set("x", old, new) for old, new in (("e", "n"), ("", "n"), ("o", "m"), ("n", "m"))]
        said += [
            store.delete_key("x"),
            store.delete_key("x"),
            store.append("a", "zz"),
            store.get("a"),
            store.append("fresh", "z"),
        ]
        said += [store.multi_set(["p", "q"], ["1", "2" * 100_000]), store.multi_get(["p", "q"]), store.wait(["p", "q"])]
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["never"], timedelta(milliseconds=50))
        said += [store.get("p"), store.has_extended_api(), store.num_keys(), store.clone().get("p")]
        if hasattr(store, "barrier"):
            said.append(store.barrier("all", 1, timedelta(seconds=60)))
        found.append(said)
    assert found[0] == found[1]


def test_a_wait_ends_when_the_last_of_its_keys_is_set_by_another_client(port: int) -> None:
    child = os.fork()
    if child == 0:
        other = member(port, 2)
        for key in ("one", "two"):
            time.sleep(0.05)
            other.set(key, key)
        os._exit(0)
    store = member(port, 2)
    store.wait(["one", "two"])
    assert (store.get("one"), store.get("two")) == (b"one", b"two")
    os.waitpid(child, 0)


def refused(port: int, *what: bytes) -> bytes:
    """What a stranger is answered until its connection ends."""
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.sendall(struct.pack("=BI", 0, STORE_MAGIC) + b"".join(what))
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while data := end.recv(4096):
                got += data
        return got


def text(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


KEY = text(b"/default_pg/0//cpu//0/0")
COMMANDS = {
    "set": b"\x01" + KEY + text(b"x"),
    "compare_set": b"\x02" + KEY + text(b"") + text(b"x"),
    "get": b"\x03" + KEY,
    "add": b"\x04" + KEY + struct.pack("=q", 1),
    "wait": b"\x06" + struct.pack("=Q", 1) + KEY,
    "num_keys": b"\x07",
    "delete": b"\x08" + KEY,
    "append": b"\x09" + KEY + text(b"x"),
    "multi_get": b"\x0a" + struct.pack("=Q", 1) + KEY,
    "multi_set": b"\x0b" + struct.pack("=Q", 1) + KEY + text(b"x"),
    "cancel_wait": b"\x0c",
    "queue_push": b"\x0e" + KEY + text(b"x"),
    "queue_pop": b"\x0f" + KEY,
    "queue_len": b"\x10" + KEY,
    "list_keys": b"\x11",
    "barrier": b"\x12" + KEY + struct.pack("=q", 1),
    "unknown": b"\xff",
    "another prefix": b"\x01" + text(b"/" + store_key_prefix("another secret", 7).encode() + b"/a") + text(b"x"),
    "a key of 2 GB": b"\x03" + struct.pack("=Q", 2**31),
    "many keys": b"\x05" + struct.pack("=Q", 2**40),
    "several keys": b"\x05" + struct.pack("=Q", 2) + KEY + KEY,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stranger_is_answered_nothing(port: int, command: str) -> None:
    store = member(port, 3)
    store.set("a", "1")
    assert refused(port, COMMANDS[command]) == b""
    assert store.get("a") == b"1"


def test_a_stranger_may_check_keys_without_a_prefix_and_learns_of_no_other_one(port: int) -> None:
    member(port, 3).set("a", "1")
    stranger = raw(port)
    assert not stranger.check(["a"]) and not stranger.check([f"{store_key_prefix('guess', 3)}/a"])
    with pytest.raises(dist.DistNetworkError):
        stranger.set("a", "2")
        stranger.get("a")


def test_what_is_no_client_of_a_store_is_closed(port: int) -> None:
    for line in (b"GET / HTTP/1.1\r\n\r\n", b'{"challenge":1}\n', b"\x01" * 100):
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.sendall(line)
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(100) == b""


def test_generations_do_not_see_each_other_and_a_new_one_ends_the_older(port: int) -> None:
    old = member(port, 10)
    old.set("a", "old")
    new = member(port, 11)
    assert not new.check(["a"])
    with pytest.raises(dist.DistNetworkError):
        old.get("a")
    with pytest.raises(dist.DistNetworkError):
        member(port, 10).get("a")
    new.set("a", "new")
    assert new.get("a") == b"new"


def test_keys_without_a_prefix_are_shared_by_the_clients_of_a_generation(port: int) -> None:
    """As NCCL does to tell the others that it writes down what it was doing."""
    first, second = raw(port), raw(port)
    for store in (first, second):
        assert not PrefixStore(store_key_prefix(SECRET, 20), store).check(["a"])
    first.set("exception_dump", "1")
    assert first.get("exception_dump") == b"1"  # nothing else says that it has arrived
    assert second.check(["exception_dump"]) and raw(port).check(["exception_dump"])


def test_nothing_of_a_prefix_follows_from_an_earlier_one() -> None:
    codes = [store_key_prefix(SECRET, number).partition(".")[2] for number in range(1000)]
    assert len(set(codes)) == 1000 and all(len(code) * 4 == 128 for code in codes)


def test_a_flood_of_silent_connections_delays_no_client(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    store = member(port, 30)
    store.set("a", "1")
    assert store.get("a") == b"1"
    for end in silent:
        end.close()
