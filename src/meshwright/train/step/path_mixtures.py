"""Detects steps whose micro-batches take different code paths, such as the two branches of `if x.mean() > 0`. One
device computes all rows in one pass, which takes one path, so rows may depend on each other through the value that
selects the path. The same holds for a value that becomes a factor: `x * (1.2 if x.mean() > 0 else 1.0)`.

Each rank describes the paths of its passes by a checksum. The all-reduce of a step adds the checksums of the ranks that
run the same pipeline stages, and their squares; both show whether these checksums are equal. If two paths occur in one
step for the first time, one micro-batch of each is gathered, and one pass of all their rows is compared with separate
passes (runtime/preflight/batch_separability.py). The code paths of a model that reads no tensor values are not recorded
(runtime/preflight/code_paths.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch
from meshwright.runtime.preflight.code_paths import StagePath
from meshwright.train.step.inputs import move_batch
from meshwright.train.step.state import TrainState

CHECKSUM_MODULUS = 1 << 20
"""The modulus of checksums. With this modulus, float64 adds the squares of the checksums of 8,192 ranks exactly."""
MAX_COMPARED_NUMBERS = 4
"""The number of comparisons of passes that differ only in the plain numbers that they compute with, such as an
`.item()`. After them, such numbers are ignored."""
QUIET_CALLS, CALL_INTERVAL = 16, 16
"""After QUIET_CALLS steps in which ranks took different paths that were all compared, the paths are gathered only in
every step of number CALL_INTERVAL of these. Gathering costs more than the rest of the checks of a step."""
MAX_COMPARED_PATHS = 8
"""The number of paths that one comparison covers; the others are compared in a later step."""


class PathMixtures:
    """The pairs of code paths that occurred in one step and were compared, on one rank. All ranks store equal pairs."""

    def __init__(self) -> None:
        self._compared: set[frozenset[StagePath]] = set()
        self._taken: dict[StagePath, int] = {}
        self._numbers_left = MAX_COMPARED_NUMBERS
        self._quiet_calls = 0

    def sums(self, state: TrainState, batches: Sequence[Batch]) -> list[float]:
        """Returns this rank's values for the all-reduce: for each pipeline rank a checksum and its square, which are
        zero for the other pipeline ranks. `batches`: the micro-batches of the step."""
        taken = state.engine.preflight.paths.taken(batches) if state.engine.outer is None else {}
        self._taken = taken if self._numbers_left else {(stage, path, 0): at for (stage, path, _), at in taken.items()}
        found = [0.0] * (2 * state.plan.pp)
        checksum = zlib.crc32(repr(sorted(self._taken)).encode()) % CHECKSUM_MODULUS if self._taken else 0
        at = 2 * state.mesh.coords.pp
        found[at : at + 2] = [float(checksum), float(checksum**2)]
        return found

    @property
    def is_new(self) -> bool:
        """Returns whether this rank's micro-batches took two paths that were not compared."""
        return bool(_pairs(self._taken) - self._compared)

    def check(self, state: TrainState, batches: Sequence[Batch], sums: Sequence[float], is_new: bool) -> None:
        """Compares micro-batches whose paths occur in one step for the first time. `sums`: the all-reduced values of
        the method `sums`. `is_new`: whether a rank knows of such paths. Every rank calls this method, with an equal
        `is_new`.

        Raises:
            PlanRefused: rows depend on each other through the value that selects the path. Every rank raises it.
        """
        count = state.plan.dp * state.plan.cp * state.plan.tp
        differ = any(count * int(square) != int(one) ** 2 for one, square in zip(sums[::2], sums[1::2], strict=True))
        self._quiet_calls += differ or is_new
        if not (differ or is_new):
            return
        if not is_new and self._quiet_calls > QUIET_CALLS and self._quiet_calls % CALL_INTERVAL:
            return
        owners: dict[StagePath, tuple[int, int]] = {}
        for rank, taken in enumerate(gather_objects(dict(self._taken))):
            for path, at in taken.items():
                owners.setdefault(path, (rank, at))
        unknown = _pairs(owners) - self._compared
        if not unknown:
            return
        self._quiet_calls = 0
        wanted = sorted({path for pair in unknown for path in pair})[:MAX_COMPARED_PATHS]
        if len({owners[path] for path in wanted}) < 2:  # one pass, such as one that recompute repeats
            return
        mine = {path: owners[path][1] for path in wanted if owners[path][0] == state.mesh.rank}
        own = {path: move_batch(batches[at], torch.device("cpu"), torch.float64) for path, at in mine.items()}
        shown = {path: batch for each in gather_objects(own) for path, batch in each.items()}
        dtype = getattr(torch, state.engine.recipe.compute)
        state.engine.preflight.compare_micro_batches(
            state.engine,
            [move_batch(shown[path], state.mesh.device, dtype) for path in wanted],
            sum(state.plan.shares) or state.plan.dp * len(batches),
        )
        self._compared |= _pairs(wanted)
        if all(one[:2] == other[:2] for one, other in unknown):
            self._numbers_left -= 1


def _pairs(paths: Mapping[StagePath, object] | Sequence[StagePath]) -> set[frozenset[StagePath]]:
    """Returns the pairs of different paths of one stage.

    >>> sorted(map(sorted, _pairs([(0, 5, 0), (0, 7, 0), (1, 5, 0)])))
    [[(0, 5, 0), (0, 7, 0)]]
    """
    return {frozenset(pair) for pair in combinations(paths, 2) if pair[0][0] == pair[1][0]}
