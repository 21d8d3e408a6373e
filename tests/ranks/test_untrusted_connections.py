"""Somebody who may connect and knows no secret, while a small run trains on two nodes whose processes may open 256
files each: the run ends in the same bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_nodes import JOB, Nodes
from test_train_run import furnished, let_go, weights
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshwright.core.rendezvous_store import STORE_MAGIC

FILES = 256
SILENT = 300
"""Connections to each port that are opened and say nothing."""
GENERATIONS = 9


class Limited(Nodes):
    """Whose processes may open FILES files each."""

    def start(self, number: int, behind: Sequence[str] = (), **more: str) -> subprocess.Popen:
        return super().start(number, ("bash", "-c", f'ulimit -n {FILES}; exec "$@"', "limited", *behind), **more)

    def ports(self) -> dict[int, str]:
        """Those on which supervisors and leaders listen, and the stores: of ranks, which are gloo's, none."""
        found = {}
        for process in self.processes:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.Error):
                    listens = [it.laddr for it in member.net_connections("tcp") if it.status == psutil.CONN_LISTEN]
                    if not member.name().startswith("mesh-rank"):
                        found |= {address.port: member.name() for address in listens if address.ip == "127.0.0.1"}
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(tmp_path_factory.mktemp("hostile"), text, JOB)


@pytest.fixture(scope="module")
def whole(place: Path) -> Nodes:
    nodes = Limited(place, "whole")
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    return nodes


WORDS = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[" * 4000 + b"\n",
    b'{"proof": "\xc3\xa9"}\n',
    b'{"proof": "00", "challenge": "11", "name": "x", "devices": 8, "order": 0}\n',
    b"\xff" * 5000,
    *(struct.pack("=BIB", 0, STORE_MAGIC, command) + struct.pack("=Q", 2**62) for command in range(20)),
]


def scan(port: int) -> None:
    """Says a number of things at a port, whatever is answered."""
    for word in WORDS:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as end:
            end.settimeout(0.05)
            end.sendall(word)
            end.recv(4096)


def poison(port: int) -> list[str]:
    """Lists the keys of a store and writes those of later generations, as torch's own client does. What it learnt."""
    learnt: list[str] = []
    with contextlib.suppress(RuntimeError):
        learnt = TCPStore("127.0.0.1", port, is_master=False).list_keys()
    for generation in range(1, GENERATIONS + 1):
        for key in range(4):
            with contextlib.suppress(RuntimeError):
                store = TCPStore("127.0.0.1", port, is_master=False)
                store.set(f"generation-{generation}/default_pg/0//cpu//0/{key}", b"\xff" * 64)
                store.num_keys()
    return learnt


@contextmanager
def flood(ports: Sequence[int]) -> Iterator[None]:
    """Inside, SILENT connections to each port are opened again and again."""
    over = threading.Event()

    def open_all(port: int) -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            if len(held) > SILENT:
                held.pop(0).close()
            over.wait(0.005)
        for end in held:
            end.close()

    threads = [threading.Thread(target=open_all, args=(port,)) for port in ports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.soak
def test_keys_that_somebody_writes_do_not_end_the_run_at_its_next_recovery(place: Path, whole: Nodes) -> None:
    nodes = Limited(place, "poisoned", until=40)
    nodes.wait_for(10)
    stores = [port for port, name in nodes.ports().items() if name == "mesh-store"]
    assert stores and [poison(port) for port in stores] == [[]] * len(stores)
    for times, node in enumerate((0, 1), 1):
        nodes.ranks(node)[0].kill()
        nodes.wait_for_event(0, "'recovery'", times=times)
    let_go(place, "poisoned")
    assert_equal(nodes, whole)


@pytest.mark.soak
def test_scans_and_floods_of_every_port_change_neither_run_nor_recovery(place: Path, whole: Nodes) -> None:
    nodes = Limited(place, "flooded", until=40)
    nodes.wait_for(10)
    ports = nodes.ports()
    assert {"mesh-store"} < set(ports.values()) and len(ports) >= 4
    for port in ports:
        scan(port)
    with flood(list(ports)):
        nodes.wait_for_next(nodes.step() + 4, 0)
        nodes.ranks(1)[0].kill()
        nodes.wait_for_event(0, "'recovery'")
        let_go(place, "flooded")
        nodes.wait_for(58)
    err = assert_equal(nodes, whole)
    assert "connections refused at the port for nodes: " in err and "Traceback" not in err


def assert_equal(nodes: Nodes, whole: Nodes) -> str:
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    assert {(event.get("lost", 0), event["source"]) for event in nodes.events() if event["kind"] == "recovery"} == {
        (0, "memory")
    }
    assert nodes.losses() == whole.losses()
    assert weights(nodes.place, nodes.run, 60) == weights(whole.place, whole.run, 60) != {}
    assert not [
        line
        for line in map(json.loads, (nodes.folder / "events.jsonl").read_text().splitlines())
        if line["kind"] == "node_lost"
    ]
    return err
