"""A node of a run, in this process: it has no ranks, and its leader is the other end of its link, or nobody."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.secure_channel import SecureChannel
from meshwright.elastic.node import NodeAgent


class Interrupted(socket.socket):
    """A SIGTERM comes in the middle of the first line."""

    asked = False

    def send(self, data: Any, flags: int = 0) -> int:
        if not self.asked:
            self.asked = True
            signal.raise_signal(signal.SIGTERM)
        return super().send(data, flags)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Who is not done by then hangs: even a wait for a lock ends so."""

    def late(*_: Any) -> None:
        raise AssertionError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_node_that_is_asked_to_go_in_the_middle_of_a_line_says_so_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, ours = os.pipe()
    agent = SimpleNamespace(ended=False, handle=idle, events=lambda _: [], close=lambda: None)
    monkeypatch.setattr(NodeAgent, "_local_agent", lambda *_: agent)
    monkeypatch.setattr(
        "meshwright.elastic.node.NODE_TIMEOUT_SECONDS", 300.0
    )  # its leader is a thread of a process that may stand still
    with socket.create_server(("127.0.0.1", 0)) as door:
        end = socket.create_connection(door.getsockname())
        leader = SecureChannel(door.accept()[0], {})
    heard: list[Any] = []

    def lead() -> None:
        ended = False
        while not ended and not any(message["event"] == "node_leaving" for message in heard):
            messages, ended = leader.read()
            heard.extend(messages)
            time.sleep(0.005)
        if not ended:
            leader.send({"do": "end", "code": 75, "line": "the others go on"})

    leads = threading.Thread(target=lead)
    node = NodeAgent(
        SecureChannel(Interrupted(fileno=end.detach()), {"logs": str(tmp_path), "warm": []}),
        "127.0.0.1",
        "secret",
        1,
        {},
    )
    leads.start()
    try:
        with within(300):
            assert node.run() == (75, "the others go on")
    finally:
        node.link.close()
        leads.join()
        leader.close()
        os.close(idle)
        os.close(ours)
    assert [message["event"] for message in heard if message["event"] != "pulse"] == ["lends", "node_leaving"]
    assert heard[-1] == {"event": "node_leaving", "signal": "SIGTERM"} and node.leaving
