"""Plays a plan event by event: one step over its links with slow ranks and weak links, or months of a fleet that fails.

The room is also the verb: `meshwright.planner.simulate(job, plan, faults)` plays one step. A package and a function
cannot have one name in one place, so
the package is callable.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.planner.simulate.run import SimulationResult
    from meshwright.spec.faults import Faults
    from meshwright.spec.job import Job
    from meshwright.spec.plan import Plan


class _CallablePackage(ModuleType):
    """The package as a verb."""

    def __call__(self, job: Job, plan: Plan | str, faults: Faults | None = None, steps: int = 0) -> SimulationResult:
        """One step of `plan`, or of its name, with `faults`; and `steps` of them, where ranks die."""
        from meshwright.planner.simulate.run import simulate

        return simulate(job, plan, faults, steps)


sys.modules[__name__].__class__ = _CallablePackage
