"""Meshwright plans, verifies, runs and supervises the training of any PyTorch model on any cluster.

    job = mw.load("job.yaml")                  # model, cluster, workload, pins
    best = mw.plan(job)[0]                     # .plan, .estimate
    trainer = mw.parallelize(model, optimizer=..., plan=best.plan)

Guarantees: importing this package imports neither torch nor numpy nor pydantic. Each public name is imported when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.core.version import __version__

if TYPE_CHECKING:
    from meshwright.analysis.nf4 import quantize_base
    from meshwright.api import estimate, export_plan, import_plan, load, plan, simulate, verify
    from meshwright.interop.recording.recorder import recording
    from meshwright.interop.recording.sequence import SequenceShard
    from meshwright.interop.recording.verify_recording import verify_recording
    from meshwright.own_loop import parallelize
    from meshwright.runtime.deferred_init import deferred_init
    from meshwright.spec.faults import Faults
    from meshwright.spec.job import Job
    from meshwright.spec.plan import Plan, parse_plan
    from meshwright.spec.precision import recipe

__all__ = [
    "Faults",
    "Job",
    "Plan",
    "SequenceShard",
    "__version__",
    "deferred_init",
    "estimate",
    "export_plan",
    "import_plan",
    "load",
    "parallelize",
    "parse_plan",
    "plan",
    "quantize_base",
    "recipe",
    "recording",
    "simulate",
    "verify",
    "verify_recording",
]

_LAZY_IMPORTS = {
    "Faults": "meshwright.spec.faults",
    "Job": "meshwright.spec.job",
    "Plan": "meshwright.spec.plan",
    "SequenceShard": "meshwright.interop.recording.sequence",
    "deferred_init": "meshwright.runtime.deferred_init",
    "estimate": "meshwright.api",
    "export_plan": "meshwright.api",
    "import_plan": "meshwright.api",
    "load": "meshwright.api",
    "parallelize": "meshwright.own_loop",
    "parse_plan": "meshwright.spec.plan",
    "plan": "meshwright.api",
    "quantize_base": "meshwright.analysis.nf4",
    "recipe": "meshwright.spec.precision",
    "recording": "meshwright.interop.recording.recorder",
    "simulate": "meshwright.api",
    "verify": "meshwright.api",
    "verify_recording": "meshwright.interop.recording.verify_recording",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Imports the module of a public name at its first use, and returns the object.

    Raises: AttributeError for any other name.
    """
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    """Returns the public names, sorted."""
    return sorted(__all__)
