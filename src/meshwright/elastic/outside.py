"""What a supervisor has of the world outside of its process: what it opens towards other machines, how it waits for them, and its clock.

A simulated cluster (tests/unit/virtual_cluster.py) gives the same supervisors others, in virtual time.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from meshwright.base.link import Door, Link
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.lending import Lender
from meshwright.elastic.mirror import Mirror


class Waiting:
    """Waits until one of several ends is readable. They are registered once, however often and by however many the process waits."""

    def __init__(self) -> None:
        self._ends = selectors.DefaultSelector()

    def add(self, handle: int, what: Any) -> None:
        """`what`: returned by `wait` when `handle` is readable."""
        self._ends.register(handle, selectors.EVENT_READ, what)

    def remove(self, handle: int) -> None:
        self._ends.unregister(handle)

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        """What is readable `linger` seconds after something was, which is waited for `timeout` seconds at most; an end of `also` ends the wait and is not
        returned."""
        with selectors.DefaultSelector() as first:
            for handle in (self._ends.fileno(), *also):  # type: ignore[attr-defined]
                first.register(handle, selectors.EVENT_READ)
            if first.select(timeout) and linger:
                time.sleep(linger)
        return [key.data for key, _ in self._ends.select(0)]

    def close(self) -> None:
        self._ends.close()


def repeat(do: Callable[[], None], seconds: float, over: threading.Event) -> None:
    """Calls `do` every so many seconds until it is `over`, in a thread of its own."""

    def run() -> None:
        while not over.wait(seconds):
            do()

    threading.Thread(target=run, name="alive", daemon=True).start()


class Outside(NamedTuple):
    """Of one supervisor."""

    clock: Callable[[], float] = time.monotonic
    waiting: Callable[[], Waiting] = Waiting
    repeat: Callable[[Callable[[], None], float, threading.Event], None] = repeat
    door: Callable[..., Door] = Door
    link: Callable[..., Link] = Link
    lender: Callable[..., Lender] = Lender
    mirror: Callable[..., Mirror] = Mirror
    holdings: Callable[[int], Holdings] = Holdings
