"""Reads steps ahead in threads, one or several.

Promise: the values and their order are those of reading directly, however many read; at most `depth` steps are ahead; what reading a step raises,
`next` raises, once, in its turn, and no step behind it comes; closing, or forgetting the reader, or leaving the interpreter ends the threads and
waits for nothing but the steps being read. Reading gives Python's lock back where it copies, decodes or splits: there threads read at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

Step = TypeVar("Step")

_PATIENCE = 5.0  # seconds that closing waits for steps being read; threads are daemons and cannot hold the process up


class _Line(Generic[Step]):
    """What the threads and their reader share. The threads hold this and not the reader, so that a forgotten reader is collected."""

    def __init__(self, first: int, stop: int, depth: int) -> None:
        self.free = threading.Semaphore(depth)
        self.changed = threading.Condition()
        self.next, self.stop = first, stop
        self.done: dict[int, Step | BaseException] = {}
        self.failed: set[int] = set()

    def claim(self) -> int | None:
        """The next step to read, once there is room for it; None when there is none."""
        self.free.acquire()
        with self.changed:
            if self.next < self.stop:
                self.next += 1
                return self.next - 1
        self.free.release()  # the others that wait for room find the same
        return None

    def put(self, step: int, value: Step | BaseException, failed: bool = False) -> None:
        with self.changed:
            self.done[step] = value
            if failed:
                self.failed.add(step)
                self.stop = min(self.stop, step + 1)
            self.changed.notify_all()

    def take(self, step: int) -> Step | BaseException:
        with self.changed:
            self.changed.wait_for(lambda: step in self.done)
            return self.done.pop(step)

    def end(self) -> None:
        with self.changed:
            self.stop = self.next
        self.free.release()


def _read_ahead(line: _Line[Step], read: Callable[[int], Step]) -> None:
    while (step := line.claim()) is not None:
        try:
            line.put(step, read(step))
        except BaseException as error:  # handed over whole: the reader decides
            line.put(step, error, failed=True)


def _close(line: _Line[Step], threads: Sequence[threading.Thread]) -> None:
    line.end()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)


class Prefetch(Generic[Step]):
    """Iterates over read(first), ..., read(stop - 1), which `readers` threads read. `waited` is how many seconds the last `next` had to wait."""

    def __init__(self, read: Callable[[int], Step], first: int, stop: int, depth: int = 2, readers: int = 1) -> None:
        self._line: _Line[Step] = _Line(first, stop, max(1, depth, readers))
        self._step, self._stop = first, stop
        threads = [
            threading.Thread(target=_read_ahead, args=(self._line, read), name="prefetch", daemon=True) for _ in range(max(1, readers))
        ]
        self.waited = 0.0
        self.close = weakref.finalize(self, _close, self._line, threads)
        for thread in threads:
            thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if self._step >= self._stop or not self.close.alive:
            raise StopIteration
        began = time.perf_counter()
        value = self._line.take(self._step)
        self.waited = time.perf_counter() - began
        if self._step in self._line.failed:
            self._stop = self._step
            assert isinstance(value, BaseException)
            raise value
        self._step += 1
        self._line.free.release()
        return value  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
