"""Reads the batches of a data set for the training loop. A caller requests (step, first row, number of rows), directly
or from threads that read in advance.

Guarantees:
- `BatchLoader.rows` depends only on its arguments, the data set, the batch size and the seed. A rank reads its own rows
  of a batch under any plan. A run that resumes at step k reads the rows that an uninterrupted run would read, without
  saved state.
- `Prefetcher` returns the same values in the same order as direct reading, with any number of threads. It prefetches at
  most `depth` steps, or one step for each thread if that is more.
- If reading a step fails, the `next` call for this step raises the error. No later step is returned.
- When the prefetcher is closed or dropped, or the interpreter exits, the threads end. Closing waits only for steps that
  are being read.

Steps count from 0. Threads run concurrently where copying, decoding or tokenizing releases the GIL.
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
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.dataset import Dataset
from meshwright.data.instructions import IGNORED_LABEL
from meshwright.data.sampler import batch_index, sample_rows

StepT = TypeVar("StepT")

_JOIN_SECONDS = 5.0  # seconds that closing waits for steps being read; threads are daemons and do not block exit


class _PrefetchQueue(Generic[StepT]):
    """State shared by the threads and their consumer.

    The threads reference this object instead of the prefetcher, so that a dropped prefetcher can be collected.
    """

    def __init__(self, first: int, stop: int, depth: int) -> None:
        self.free = threading.Semaphore(depth)
        self.changed = threading.Condition()
        self.next, self.stop = first, stop
        self.done: dict[int, StepT | BaseException] = {}
        self.failed: set[int] = set()

    def claim(self) -> int | None:
        """Waits until the queue has room, and returns the next step to read, or None if no step is left."""
        self.free.acquire()
        with self.changed:
            if self.next < self.stop:
                self.next += 1
                return self.next - 1
        self.free.release()  # wakes the next waiting thread, which must end too
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
        except BaseException as error:  # the thread that calls `next` raises the error
            line.put(step, error, failed=True)


def _stop_readers(line: _PrefetchQueue[StepT], threads: Sequence[threading.Thread]) -> None:
    line.end()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)


class Prefetcher(Generic[StepT]):
    """Iterates over read(first), ..., read(stop - 1). `readers` threads call `read` in advance.

    `wait_seconds` is the number of seconds that the last `next` call waited.
    """

    def __init__(self, read: Callable[[int], StepT], first: int, stop: int, depth: int = 2, readers: int = 1) -> None:
        self._line: _PrefetchQueue[StepT] = _PrefetchQueue(first, stop, max(1, depth, readers))
        self._step, self._stop = first, stop
        threads = [
            threading.Thread(target=_read_ahead, args=(self._line, read), name="prefetch", daemon=True)
            for _ in range(max(1, readers))
        ]
        self.wait_seconds = 0.0
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
        self.wait_seconds = time.perf_counter() - began
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
"""Number of threads that read batches for an accelerator."""


class BatchLoader:
    """The batches of `dataset`, with `batch` rows per step, in the order that `seed` determines."""

    def __init__(self, dataset: Dataset, batch: int, seed: int, next_token: bool = False) -> None:
        """Makes the loader. `next_token`: whether the label at position t is token t + 1. If False, the label is token
        t, and the model shifts labels.
        """
        self.dataset, self.batch, self.seed, self.next_token = dataset, batch, seed, next_token
        self.skipped_batches: Sequence[tuple[int, int]] = ()
        """Sorted intervals [start, stop) of batches that no step reads. The steps read the remaining batches in order.
        """
        self.row_values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Entries that the data set does not have, by name: a value for each training row, and for each validation row.
        """

    @property
    def labels_per_step(self) -> int | None:
        """Returns the number of labels of a whole batch that count in the loss, or None if this number differs between
        batches."""
        per_row = self.dataset.labels_per_row
        return None if per_row is None else per_row * self.batch

    def rows(self, step: int, first: int = 0, count: int | None = None) -> TensorBatch:
        """Returns rows `first` to `first + count - 1` of the batch of `step`. Without `count`, returns all rows from
        `first` on.

        Raises:
            InputError: the batch does not have these rows.
        """
        count = self.batch - first if count is None else count
        if not (step >= 0 and first >= 0 and 0 < count <= self.batch - first):
            raise InputError(
                Message(
                    "step {step} has rows 0 to {batch}, not {count} rows from {first} on",
                    step=step,
                    batch=self.batch - 1,
                    count=count,
                    first=first,
                )
            )
        start = batch_index(step, self.skipped_batches) * self.batch + first
        chosen = sample_rows(self.seed, start, count, self.dataset.rows)
        batch = self.dataset.training(chosen, np.arange(start, start + count, dtype=np.int64), self.seed)
        return self._labelled(batch) | {name: values[chosen] for name, (values, _) in self.row_values.items()}

    def validation(self, count: int, first: int = 0) -> TensorBatch:
        """Returns validation rows `first` to `first + count - 1`. The rows and their masks are always the same.

        Raises:
            InputError: the data set does not have these rows.
        """
        if not (first >= 0 and 0 < count <= self.dataset.validation_rows - first):
            raise InputError(
                Message(
                    "{count} held-out rows from row {first} on do not exist: the data set has {validation_rows}",
                    count=count,
                    first=first,
                    validation_rows=self.dataset.validation_rows,
                )
            )
        return self._labelled(self.dataset.validation(np.arange(first, first + count, dtype=np.int64)))

    def validation_batches(self, least: int) -> Iterator[TensorBatch]:
        """Yields validation batches with as many rows as a training batch. Together they contain `least` validation
        rows, but at least one batch, and at most all validation rows. The rows are evenly spaced in the validation
        data.

        The last batch is padded with rows that have no valid label. Batches without the entry "labels" are not padded.
        """
        rows = self.evaluated_rows(least)
        for first in range(0, len(rows), self.batch):
            here = rows[first : first + self.batch]
            batch = self._labelled(self.dataset.validation(here))
            if "labels" not in batch:
                yield batch | {name: values[here] for name, (_, values) in self.row_values.items()}
                continue
            lacking = self.batch - len(batch["labels"])
            filled = {
                name: torch.cat([value, value[:1].expand(lacking, *value.shape[1:])]) for name, value in batch.items()
            }
            filled["labels"][self.batch - lacking :] = IGNORED_LABEL
            yield filled

    def evaluated_rows(self, least: int) -> NDArray[np.int64]:
        """Returns the indices of the rows of `validation_batches`."""
        count = min(self.dataset.validation_rows, max(least, self.batch))
        return np.arange(count) * self.dataset.validation_rows // max(count, 1)

    def _labelled(self, batch: TensorBatch) -> TensorBatch:
        if not self.next_token:
            return batch
        labels = torch.full_like(batch["labels"], IGNORED_LABEL)
        labels[:, :-1] = batch["labels"][:, 1:]
        return {**batch, "labels": labels}

    def prefetch(
        self,
        ranges: Sequence[SampleRange],
        first: int,
        stop: int,
        depth: int = 2,
        pin: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Prefetcher[list[TensorBatch]]:
        """Returns an iterator over steps from `first` to `stop` - 1. For each step it yields a list: one batch for
        every (first, count) in `ranges`. At most `depth` steps are read ahead, or one per reading thread if that is
        more. If the data of a step cannot be read, the iterator raises InputError.

        For an accelerator, `pin` copies a tensor to pinned memory, so that copies to the device overlap with
        computation. Several threads read and call `pin`. Without `pin`, for CPU ranks, one thread reads, since more
        threads would take cores from the computation.
        """

        def read(step: int) -> list[TensorBatch]:
            try:
                batches = [self.rows(step, *part) for part in ranges]
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                raise InputError(
                    Message(
                        "the data of step {step} cannot be read: {reason}{where}; {describe}",
                        step=step + 1,
                        reason=error.strerror or error,
                        where=where,
                        describe=self.dataset.describe(),
                    )
                ) from error
            return (
                batches if pin is None else [{name: pin(value) for name, value in batch.items()} for batch in batches]
            )

        readers = 1 if pin is None else ACCELERATOR_READER_THREADS
        return Prefetcher(read, first, stop, max(depth, readers), readers)
