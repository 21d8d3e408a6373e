"""What each rank read in a step, and what all of them read together: a line of the ledger (spec/ledger.py), in the step's record.

Promise: ranks of one replica read the same bytes, or the run ends with the name of one that does not: a damaged file or memory of one machine is never trained on
by half. `content` is the sum modulo 2^64 over all rows of the xxh3 of a row's bytes, seeded with its number: the same under every plan
and in every run that reads the same data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from meshwright.base.errors import MeshwrightError
from meshwright.data.loader import Batch, Range
from meshwright.spec.grid import Grid
from meshwright.spec.ledger import WORD, Samples, samples_read

HALF = 2**32


class Line(NamedTuple):
    """Of one rank or of all."""

    samples: Samples
    content: int

    @property
    def numbers(self) -> list[float]:
        """Small enough for float64 to hold each exactly."""
        return [float(self.samples.number), *(float(half) for word in (self.samples.squares, self.content) for half in divmod(word, HALF))]

    @property
    def fields(self) -> dict[str, Any]:
        """Of a record."""
        return {"samples": self.samples.text, "content": f"{self.content:016x}"}


def line_of(batches: Sequence[Batch], ranges: Sequence[Range], start: int) -> Line:
    """Of `batches`, which are the rows `ranges` of the batch whose first sample is number `start`."""
    content = 0
    for batch, (first, count) in zip(batches, ranges, strict=True):
        arrays = [np.ascontiguousarray(batch[name].numpy()) for name in sorted(batch)]
        for row in range(count):
            digest = xxhash.xxh3_64(seed=(start + first + row) % WORD)
            for array in arrays:
                digest.update(array[row].data)
            content += digest.intdigest()
    return Line(samples_read((start + first, count) for first, count in ranges), content % WORD)


def line_from(numbers: Sequence[float]) -> Line:
    """Of what `numbers` made of it."""
    count, *halves = map(int, numbers)
    squares, content = (high * HALF + low for high, low in (halves[:2], halves[2:]))
    return Line(Samples(count, squares), content)


def joined(by_rank: Sequence[Sequence[float]], grid: Grid, step: int) -> Line:
    """What all ranks read. Raises MeshwrightError on all of them when two that must read the same did not."""
    lines = [line_from(numbers) for numbers in by_rank]
    replicas: dict[int, list[int]] = {}
    for rank in range(len(lines)):
        replicas.setdefault(grid.replica(rank), []).append(rank)
    for ranks in replicas.values():
        votes = Counter(lines[rank] for rank in ranks)
        usual = votes.most_common(1)[0][0]
        for rank in ranks:
            if lines[rank] != usual:
                other = next(other for other in ranks if lines[other] == usual)
                raise MeshwrightError(
                    f"step {step}: rank {rank} and rank {other} share their rows and read different bytes: "
                    "a data file, its cache or the memory of one of them is damaged"
                )
    firsts = [lines[ranks[0]] for ranks in replicas.values()]
    counts, squares = sum(line.samples.number for line in firsts), sum(line.samples.squares for line in firsts) % WORD
    return Line(Samples(counts, squares), sum(line.content for line in firsts) % WORD)
