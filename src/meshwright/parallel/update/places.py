"""Where the tensors of a flat unit lie in their whole ones: what rounding and whole updates go by."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.anatomy import intervals
from meshwright.parallel.engine import Parallel
from meshwright.parallel.state import cut_of
from meshwright.parallel.update.lean import Lean
from meshwright.parallel.update.rounding import Places
from meshwright.parallel.zero.flat import FlatUnit


def places_of(engine: Parallel, unit: FlatUnit) -> Iterator[Places]:
    """Of the run of `unit` that this rank updates."""
    for name, offset in unit.unit.offsets.items():
        start = max(offset, unit.own.start)
        stop = min(offset + unit.parameters[name].numel(), unit.own.stop)
        if start >= stop:
            continue
        split, index, ranks, before = cut_of(engine, unit, name)
        at = start - unit.own.start
        if split is None:
            yield Places(name, at, start - offset, stop - start, before)
            continue
        shape = engine.shapes[name]
        held = intervals(split.parts or shape[split.dim], index, ranks)
        rows = torch.cat([torch.arange(first, last) for first, last in held])
        inner = shape[split.dim + 1 :].numel()
        if engine.experts is not None and name in engine.experts.dealt:
            before *= ranks  # of this rank's share of the experts that lie before; whole they are so many times as long
        yield Places(name, at, start - offset, stop - start, before, rows, shape[split.dim], inner)


def give_places(engine: Parallel, seed: int) -> None:
    """Units that round know where their elements belong, and by what seed."""
    for unit in engine.zero.trained:
        if isinstance(unit.master, Lean) and unit.master.rounds:
            unit.master.places, unit.master.seed = tuple(places_of(engine, unit)), seed
