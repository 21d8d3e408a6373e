"""Reads steps ahead in threads, one or several.

Promise: the values and their order are those of reading directly, however many read; at most `depth` steps are ahead;
what reading a step raises,
`next` raises, once, in its turn, and no step behind it comes; closing, or forgetting the reader, or leaving the
interpreter ends the threads and
waits for nothing but the steps being read. Reading gives Python's lock back where it copies, decodes or splits: there
threads read at once.

Batches by (step, first, count): the same rows whoever asks, directly or ahead of time by a thread.

Promise: `rows(step, first, count)` depends on nothing but its arguments, the data set, the batch size and the seed. So
a rank reads its own
part of a batch under any plan, and a run that goes on at step k reads what an uninterrupted one would have read. There
is no state to save.
Steps count from 0.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
import torch

from meshwright.core.errors import InputError
from meshwright.data.dataset import IGNORED_LABEL, Dataset
from meshwright.data.sampler import batch_index, sample_rows

StepT = TypeVar("StepT")

_JOIN_SECONDS = (
    5.0  # seconds that closing waits for steps being read; threads are daemons and cannot hold the process up
)


class _PrefetchQueue(Generic[StepT]):
    """What the threads and their reader share. The threads hold this and not the reader, so that a forgotten reader is
    collected."""

    def __init__(self, first: int, stop: int, depth: int) -> None:
        self.free = threading.Semaphore(depth)
        self.changed = threading.Condition()
        self.next, self.stop = first, stop
        self.done: dict[int, StepT | BaseException] = {}
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

    def put(self, step: int, value: StepT | BaseException, failed: bool = False) -> None:
        with self.changed:
            self.done[step] = value
            if failed:
                self.failed.add(step)
                self.stop = min(self.stop, step + 1)
            self.changed.notify_all()

    def take(self, step: int) -> StepT | BaseException:
        with self.changed:
            self.changed.wait_for(lambda: step in self.done)
            return self.done.pop(step)

    def end(self) -> None:
        with self.changed:
            self.stop = self.next
        self.free.release()


def _read_ahead(line: _PrefetchQueue[StepT], read: Callable[[int], StepT]) -> None:
    while (step := line.claim()) is not None:
        try:
            line.put(step, read(step))
        except BaseException as error:  # handed over whole: the reader decides
            line.put(step, error, failed=True)


def _stop_readers(line: _PrefetchQueue[StepT], threads: Sequence[threading.Thread]) -> None:
    line.end()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)


class Prefetcher(Generic[StepT]):
    """Iterates over read(first), ..., read(stop - 1), which `readers` threads read. `waited` is how many seconds the
    last `next` had to wait."""

    def __init__(self, read: Callable[[int], StepT], first: int, stop: int, depth: int = 2, readers: int = 1) -> None:
        self._line: _PrefetchQueue[StepT] = _PrefetchQueue(first, stop, max(1, depth, readers))
        self._step, self._stop = first, stop
        threads = [
            threading.Thread(target=_read_ahead, args=(self._line, read), name="prefetch", daemon=True)
            for _ in range(max(1, readers))
        ]
        self.waited = 0.0
        self.close = weakref.finalize(self, _stop_readers, self._line, threads)
        for thread in threads:
            thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepT:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


TensorBatch = dict[str, torch.Tensor]
SampleRange = tuple[int, int]

ACCELERATOR_READER_THREADS = 4
"""Threads that read for an accelerator."""


class BatchLoader:
    """The batches of `dataset`, `batch` rows a step, ordered by `seed`."""

    def __init__(self, dataset: Dataset, batch: int, seed: int, next_token: bool = False) -> None:
        """`next_token`: the label at position t is token t + 1. Otherwise it is token t, and the loss shifts the labels
        itself."""
        self.dataset, self.batch, self.seed, self.next_token = dataset, batch, seed, next_token
        self.left_out: Sequence[tuple[int, int]] = ()
        """Batches [first, stop), in order, that no step reads: the steps behind read the next ones."""

    @property
    def labels_per_step(self) -> int | None:
        """Labels of a whole batch that count in the loss; None where only counting them tells."""
        per_row = self.dataset.labels_per_row
        return None if per_row is None else per_row * self.batch

    def rows(self, step: int, first: int = 0, count: int | None = None) -> TensorBatch:
        """Rows `first` to `first + count - 1` of the batch of `step`; without `count` to its end."""
        count = self.batch - first if count is None else count
        if not (step >= 0 and first >= 0 and 0 < count <= self.batch - first):
            raise InputError(f"step {step} has rows 0 to {self.batch - 1}, not {count} rows from {first} on")
        start = batch_index(step, self.left_out) * self.batch + first
        chosen = sample_rows(self.seed, start, count, self.dataset.rows)
        return self._labelled(self.dataset.training(chosen, np.arange(start, start + count, dtype=np.int64), self.seed))

    def held_out(self, count: int, first: int = 0) -> TensorBatch:
        """Held-out rows `first` to `first + count - 1`: always the same, masked alike every time."""
        if not (first >= 0 and 0 < count <= self.dataset.held_out_rows - first):
            raise InputError(f"{count} held-out rows from {first} on: the data set has {self.dataset.held_out_rows}")
        return self._labelled(self.dataset.held_out(np.arange(first, first + count, dtype=np.int64)))

    def held_out_batches(self, least: int) -> Iterator[TensorBatch]:
        """A batch of held-out rows, or `least` of them where that is more, spread evenly over all there are, in batches
        of the training's size.

        Rows that fill the last one up have no valid label.
        """
        count = min(self.dataset.held_out_rows, max(least, self.batch))
        rows = np.arange(count) * self.dataset.held_out_rows // max(count, 1)
        for first in range(0, count, self.batch):
            batch = self._labelled(self.dataset.held_out(rows[first : first + self.batch]))
            lacking = self.batch - len(batch["labels"])
            filled = {
                name: torch.cat([value, value[:1].expand(lacking, *value.shape[1:])]) for name, value in batch.items()
            }
            filled["labels"][self.batch - lacking :] = IGNORED_LABEL
            yield filled

    def _labelled(self, batch: TensorBatch) -> TensorBatch:
        if not self.next_token:
            return batch
        labels = torch.full_like(batch["labels"], IGNORED_LABEL)
        labels[:, :-1] = batch["labels"][:, 1:]
        return {**batch, "labels": labels}

    def prefetch(
        self, ranges: Sequence[SampleRange], first: int, stop: int, depth: int = 2, device: str = "cpu"
    ) -> Prefetcher[list[TensorBatch]]:
        """For each step from `first` to `stop` - 1 a list with the rows of every (first, count) of `ranges`, read up to
        `depth` steps ahead.

        For an accelerator several threads read, since it needs no core, and what they read lies in pinned memory, from
        where it is copied while
        the device computes. Ranks on cores would only take these from each other.
        """

        def read(step: int) -> list[TensorBatch]:
            try:
                batches = [self.rows(step, *part) for part in ranges]
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                raise InputError(
                    f"the data of step {step + 1} cannot be read: {error.strerror or error}{where}; {self.dataset.describe()}"
                ) from error
            return (
                batches
                if device == "cpu"
                else [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
            )

        readers = 1 if device == "cpu" else ACCELERATOR_READER_THREADS
        return Prefetcher(read, first, stop, max(depth, readers), readers)
