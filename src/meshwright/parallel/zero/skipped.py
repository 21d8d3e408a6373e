"""Parameters that an update skips because no gradient came to them on any rank, as torch's optimizers skip a parameter whose gradient is None.

How runs of an optimizer skip them: [Note: skipped parameters] of master.py. Which ones: `Zero.unreached`.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from itertools import pairwise

import torch

from meshwright.base.errors import InputError
from meshwright.parallel.zero.flat import FlatUnit
from meshwright.parallel.zero.master import Extent, Run, nested


def check_lists(optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Raises InputError where the tensors `names` are to be skipped and the optimizer has lists of its parameters besides its groups: it would not see the
    parts that these are cut into."""
    for one in nested(optimizer) if names else ():
        for key, value in vars(one).items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(part, Run) for part in parts):
                raise InputError(
                    f"no gradient came to {min(names)}, and {type(one).__name__} has parameters in {key} besides those of its param_groups, so that it cannot "
                    f"skip this one as torch's optimizers do: read param_groups in its step, or freeze {min(names)} before parallelize"
                )


def skip(unit: FlatUnit, names: Set[str], stateless: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """The next update of `unit` has no gradient for the tensors `names`. `stateless`: tensors that every update before it has skipped."""
    if unit.master.tensors is not None:
        unit.master.tensors.skipped = names
        return
    separate(unit, names, optimizer)
    mark(unit, names, stateless)


def mark(unit: FlatUnit, names: Set[str], stateless: Set[str]) -> None:
    """As `skip`, of a unit whose runs are cut so."""
    for run in unit.master.single:
        run.skipped, run.stateless = run.path in names, run.path in stateless


def separate(unit: FlatUnit, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
    """Runs of the optimizer hold elements of those tensors of `unit` that are in `names` one by one."""
    own = unit.own
    new = (names & unit.unit.offsets.keys()) - {run.path for run in unit.master.single} if names else names
    if not new or own.stop == own.start:
        return
    # A tensor without elements begins where the next one does: it has no extent.
    begins = sorted((offset, name) for name, offset in unit.unit.offsets.items() if unit.parameters[name].numel())
    starts = [own.start, *(min(max(offset, own.start), own.stop) for offset, _ in begins[1:]), own.stop]
    extents = [Extent(first - own.start, last - own.start, name) for (first, last), (_, name) in zip(pairwise(starts), begins, strict=True)]
    here = [each for each in extents if each.start < each.stop]
    if new & {each.name for each in here}:
        unit.master.separate(optimizer, here, new)
