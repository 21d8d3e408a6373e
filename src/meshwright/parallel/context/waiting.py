"""Seconds that a rank waits for the pieces of others: what a step's record says of the context axis."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class Waiting:
    """`seconds` since it was last set to 0."""

    seconds: float = 0.0

    def wait(self, works: Iterable[Any]) -> None:
        """Until all of `works` are done."""
        began = time.perf_counter()
        for work in works:
            work.wait()
        self.seconds += time.perf_counter() - began
