"""What the runtime of this version runs, as one table that both wings read. The planner prices more: it says so beside a plan, and `train`
searches only here.

>>> from meshwright.spec.plan import parse_plan, listed
>>> runs(parse_plan("dp8.tp2.z1.off-optimizer25")), runs(parse_plan("dp4.z3.off-parameters-disk"))
(True, True)
"""

from __future__ import annotations

from itertools import product
from typing import Any

from meshwright.spec.plan import ACTIVATIONS, OPTIMIZER, PARAMETERS, Offload, Plan, Schedule, away_parts

RUNS: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(Schedule),
    "offload": tuple(
        tuple(what for what in kept if what is not None)
        for kept in product((None, *OPTIMIZER), (None, Offload.gradients), (None, *PARAMETERS), (None, *ACTIVATIONS))
    ),
}
"""Values of the fields of a plan that run; every other field runs with all of its values."""


def missing(plan: Plan) -> tuple[str, ...]:
    """The parts of the plan's name that this version does not run yet; empty when it runs."""
    said = {
        "schedule": str(plan.schedule),
        "offload": ".".join(away_parts(plan)),
    }
    return tuple(said[name] for name, values in RUNS.items() if getattr(plan, name) not in values)


def runs(plan: Plan) -> bool:
    """Whether this version runs the plan."""
    return not missing(plan)
