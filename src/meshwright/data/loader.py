"""Batches by (step, first, count): the same rows whoever asks, directly or ahead of time by a thread.

Promise: `rows(step, first, count)` depends on nothing but its arguments, the data set, the batch size and the seed. So a rank reads its own
part of a batch under any plan, and a run that goes on at step k reads what an uninterrupted one would have read. There is no state to save.
Steps count from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from meshwright.base.errors import InputError
from meshwright.data.dataset import Dataset
from meshwright.data.masking import IGNORED
from meshwright.data.prefetch import Prefetch
from meshwright.data.sampler import batch_of, samples

Batch = dict[str, torch.Tensor]
Range = tuple[int, int]

READERS = 4
"""Threads that read for an accelerator."""


class Loader:
    """The batches of `dataset`, `batch` rows a step, ordered by `seed`."""

    def __init__(self, dataset: Dataset, batch: int, seed: int, next_token: bool = False) -> None:
        """`next_token`: the label at position t is token t + 1. Otherwise it is token t, and the loss shifts the labels itself."""
        self.dataset, self.batch, self.seed, self.next_token = dataset, batch, seed, next_token
        self.left_out: Sequence[tuple[int, int]] = ()
        """Batches [first, stop), in order, that no step reads: the steps behind read the next ones."""

    @property
    def labels_per_step(self) -> int | None:
        """Labels of a whole batch that count in the loss; None where only counting them tells."""
        per_row = self.dataset.labels_per_row
        return None if per_row is None else per_row * self.batch

    def rows(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """Rows `first` to `first + count - 1` of the batch of `step`; without `count` to its end."""
        count = self.batch - first if count is None else count
        if not (step >= 0 and first >= 0 and 0 < count <= self.batch - first):
            raise InputError(f"step {step} has rows 0 to {self.batch - 1}, not {count} rows from {first} on")
        start = batch_of(step, self.left_out) * self.batch + first
        chosen = samples(self.seed, start, count, self.dataset.rows)
        return self._labelled(self.dataset.training(chosen, np.arange(start, start + count, dtype=np.int64), self.seed))

    def held_out(self, count: int, first: int = 0) -> Batch:
        """Held-out rows `first` to `first + count - 1`: always the same, masked alike every time."""
        if not (first >= 0 and 0 < count <= self.dataset.held_out_rows - first):
            raise InputError(f"{count} held-out rows from {first} on: the data set has {self.dataset.held_out_rows}")
        return self._labelled(self.dataset.held_out(np.arange(first, first + count, dtype=np.int64)))

    def held_out_batches(self, least: int) -> Iterator[Batch]:
        """A batch of held-out rows, or `least` of them where that is more, spread evenly over all there are, in batches of the training's size.

        Rows that fill the last one up have no valid label.
        """
        count = min(self.dataset.held_out_rows, max(least, self.batch))
        rows = np.arange(count) * self.dataset.held_out_rows // max(count, 1)
        for first in range(0, count, self.batch):
            batch = self._labelled(self.dataset.held_out(rows[first : first + self.batch]))
            lacking = self.batch - len(batch["labels"])
            filled = {name: torch.cat([value, value[:1].expand(lacking, *value.shape[1:])]) for name, value in batch.items()}
            filled["labels"][self.batch - lacking :] = IGNORED
            yield filled

    def _labelled(self, batch: Batch) -> Batch:
        if not self.next_token:
            return batch
        labels = torch.full_like(batch["labels"], IGNORED)
        labels[:, :-1] = batch["labels"][:, 1:]
        return {**batch, "labels": labels}

    def prefetch(self, ranges: Sequence[Range], first: int, stop: int, depth: int = 2, device: str = "cpu") -> Prefetch[list[Batch]]:
        """For each step from `first` to `stop` - 1 a list with the rows of every (first, count) of `ranges`, read up to `depth` steps ahead.

        For an accelerator several threads read, since it needs no core, and what they read lies in pinned memory, from where it is copied while
        the device computes. Ranks on cores would only take these from each other.
        """

        def read(step: int) -> list[Batch]:
            try:
                batches = [self.rows(step, *part) for part in ranges]
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                raise InputError(
                    f"the data of step {step + 1} cannot be read: {error.strerror or error}{where}; {self.dataset.describe()}"
                ) from error
            return batches if device == "cpu" else [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]

        readers = 1 if device == "cpu" else READERS
        return Prefetch(read, first, stop, max(depth, readers), readers)
