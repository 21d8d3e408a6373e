"""Connections that were refused at the port for nodes, as lines for a person: one for each reason in EVERY seconds at most."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from meshwright.base.link import OTHER_TOKEN

EVERY = 60.0
"""Seconds between two lines of the same reason."""


class Refusals:
    """Called with the reason and the address of each refused connection, from any thread; `say` gets the lines."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._counts: Counter[str] = Counter()
        self._next: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, reason: str, host: str) -> None:
        with self._lock:
            self._counts[reason] += 1
            if (now := self._clock()) < self._next.get(reason, 0.0):
                return
            self._next[reason], count = now + EVERY, self._counts.pop(reason)
        if reason == OTHER_TOKEN:
            remedy = "start that node with the MESHWRIGHT_TOKEN of this run, or let it share the run folder"
            self._say(f"a node at {host} has another token and was refused ({count} since the last such line): {remedy}")
        else:
            self._say(f"connections refused at the port for nodes: {count}, the last one from {host or 'an unknown address'}: {reason}")
