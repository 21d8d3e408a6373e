"""Polling for errors of other ranks while this rank waits."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from meshwright.runtime.error_propagation import STORE_POLL_SECONDS, ErrorPropagator, ErrorRecord, RemoteRankError


class SlowStore:
    """A store whose link is down until `up` is set."""

    def __init__(self) -> None:
        self.up, self.values = threading.Event(), dict[str, str]()

    def check(self, keys: list[str]) -> bool:
        self.up.wait(10.0)
        return keys[0] in self.values

    def get(self, key: str) -> str:
        return self.values[key]


def test_a_poll_does_not_wait_for_the_store_and_raises_what_the_store_has_once_it_answers() -> None:
    """A rank whose poll blocks does not report that it waits, and would count as hung."""
    store: Any = SlowStore()
    calls = ErrorPropagator(store, "call")
    began = time.monotonic()
    for _ in range(20):
        calls.poll(1.0)
        time.sleep(0.05)
    assert time.monotonic() - began < 5.0
    store.values["call/error"] = json.dumps(ErrorRecord(1, 1, "", "ValueError: no"))
    calls._call_number = 1
    store.up.set()
    with pytest.raises(RemoteRankError, match="rank 1 raised ValueError: no"):
        for _ in range(100):
            calls.poll(1.0)
            time.sleep(STORE_POLL_SECONDS / 4)
