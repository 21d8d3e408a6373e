"""Numbers that a model's forward draws from Python's or numpy's generator: no rank knows those of another.

Torch's own generators are seeded by the plan (tensor/chance.py). Python's and numpy's are each process's: ranks that compute one row together, and a block that
is recomputed, would draw other numbers each. Data ranks may: their rows are different ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.anatomy.seeding import set_seed
from meshwright.base.errors import PlanRefused
from meshwright.spec.plan import Plan, Recompute


@contextmanager
def undrawn(plan: Plan, checked: bool) -> Iterator[None]:
    """Raises PlanRefused where the forward inside drew such numbers and `plan` lets several ranks, or two passes, compute the same rows. Nothing is done
    where that was `checked` before."""
    together = plan.tp > 1 or plan.cp > 1 or plan.stages > 1
    if checked or not (together or plan.recompute != Recompute.none):
        yield
        return
    before = _states()
    yield
    drawn = [name for name, state in _states().items() if before.get(name, state) != state]
    if drawn:
        raise PlanRefused(
            f"plan {plan.name}: the model's forward draws random numbers from {drawn[0]}, which differ between the ranks and passes that compute the same "
            "rows: draw them with torch, or use data ranks without recompute"
        )


def seed_all(seed: int) -> None:
    """Torch's generators, Python's and numpy's."""
    set_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Python's and numpy's generators go on afterwards as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    own, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _states() -> dict[str, Any]:
    """Of the generators that may be used."""
    found: dict[str, Any] = {"Python's random": hash(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found
