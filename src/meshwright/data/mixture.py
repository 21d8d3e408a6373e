"""Mixes several data sources by weight: sample n comes from a source that is a pure function of (seed, n), so there is
no state to save.

Samples are numbered in blocks of BLOCK_SAMPLES. Every block has the same number of samples of each source: its weight
times BLOCK_SAMPLES, rounded by the largest remainders. A permutation keyed by (seed, block) orders the samples of a
block. Each source has its own order of rows and its own epochs, as in sampler.py.

Guarantees:
- The order is the same under any plan, on any number of ranks, and after a restart at any step.
- After each block, the number of samples of a source differs by less than one from its weight times the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.corpus import ARRAY_SUFFIXES, find_files
from meshwright.data.dataset import DataObjective, Dataset, LogFunction, choose_tokenizer_name, open_dataset
from meshwright.data.sampler import derive_key, permute_indices, rows_of_samples
from meshwright.data.tokens import Tokenizer
from meshwright.spec.workload import DataConfig

BLOCK_SAMPLES = 1000
"""Samples in which every source has its exact number; weights have this resolution."""

Int64Array = NDArray[np.int64]


def block_counts(weights: Sequence[float]) -> Int64Array:
    """Returns the number of samples of each source in a block. Their sum is BLOCK_SAMPLES.

    >>> block_counts([2, 1]).tolist()
    [667, 333]
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * BLOCK_SAMPLES
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK_SAMPLES - int(counts.sum())]] += 1
    return counts


def split_samples(numbers: Int64Array, seed: int, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns for each sample number its source, and its index among all samples of this source."""
    places, ends = np.empty_like(numbers), np.cumsum(counts)
    blocks = numbers // BLOCK_SAMPLES
    for block in np.unique(blocks):
        chosen = blocks == block
        key = derive_key(seed, 4, int(block))
        places[chosen] = permute_indices(numbers[chosen] % BLOCK_SAMPLES, BLOCK_SAMPLES, key)
    sources = np.searchsorted(ends, places, side="right").astype(np.int64)
    return sources, blocks * counts[sources] + places - (ends - counts)[sources]


class MixtureDataset:
    """The rows of several data sets of one kind, with weights."""

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.parts, self.counts = parts, block_counts(weights)
        self.rows, self.validation_rows = (
            sum(part.rows for part in parts),
            sum(part.validation_rows for part in parts),
        )
        self.vocabulary = max(part.vocabulary for part in parts)
        self.digest = "+".join(f"{count}:{part.digest}" for count, part in zip(self.counts, parts, strict=True))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer of all sources."""
        return self.parts[0].tokenizer

    @property
    def labels_per_row(self) -> int | None:
        """Returns the number of labels of a row, or None if it differs between rows."""
        found = {part.labels_per_row for part in self.parts}
        return found.pop() if len(found) == 1 else None

    def describe(self) -> str:
        """Returns one line about the sources, with the share of each in the samples."""
        parts = [
            Message("{share} {source}", share=f"{count / BLOCK_SAMPLES:.1%}", source=part.describe())
            for count, part in zip(self.counts.tolist(), self.parts, strict=True)
        ]
        return Message("{parts}", parts=parts)

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the batch of the samples `numbers`. `rows` is not used: each source has its own order of rows."""
        sources, places = split_samples(numbers, seed, self.counts)
        found = [
            rows_of_samples(derive_key(seed, 5, source), places[sources == source], part.rows)
            for source, part in enumerate(self.parts)
        ]
        return self._gathered(sources, [(row, numbers[sources == at], seed) for at, row in enumerate(found)])

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the batch of the validation rows with indices `rows`: those of the first source come first."""
        ends = np.cumsum([part.validation_rows for part in self.parts])
        sources = np.searchsorted(ends, rows, side="right").astype(np.int64)
        starts = ends - [part.validation_rows for part in self.parts]
        return self._gathered(sources, [(rows[sources == at] - start,) for at, start in enumerate(starts.tolist())])

    def _gathered(self, sources: Int64Array, wanted: Sequence[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
        """Returns one batch from the rows of each source, in the order of `sources`."""
        batches = [
            part.training(*rows) if len(rows) == 3 else part.validation(*rows)
            for part, rows in zip(self.parts, wanted, strict=True)
            if len(rows[0])
        ]
        order = torch.from_numpy(np.argsort(np.argsort(sources, kind="stable"), kind="stable"))
        return {name: torch.cat([batch[name] for batch in batches])[order] for name in batches[0]}


def open_mixture(
    data: DataConfig,
    sequence: int,
    vocabulary: int,
    objective: DataObjective,
    say: LogFunction,
    positions: bool,
    report_corruption: LogFunction,
) -> Dataset:
    """Opens the data of a job as `open_dataset` does. With `data.weights` it is a mixture, whose sources share one
    tokenizer.

    Raises: InputError as `open_dataset`, or if the sources are of different kinds.
    """
    rest = (sequence, vocabulary, objective, say, positions, report_corruption)
    if not data.weights:
        return open_dataset(data, *rest)
    files = find_files(data.sources)
    if data.tokenizer in ("auto", "bpe") and not any(path.suffix.lower() in ARRAY_SUFFIXES for path in files):
        data = data.but(tokenizer=choose_tokenizer_name(data, files, vocabulary, say))
    parts = [open_dataset(data.but(source=source, weights=()), *rest) for source in data.sources]
    kinds = [(type(part).__name__, part.tokenizer is None) for part in parts]
    if len(set(kinds)) > 1:
        other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
        raise InputError(
            Message(
                "data.weights: {one} and {other} are data of different kinds (text, conversations, token arrays) and "
                "do not mix",
                one=Path(data.sources[0]).name,
                other=Path(data.sources[other]).name,
            )
        )
    return MixtureDataset(parts, data.weights)
