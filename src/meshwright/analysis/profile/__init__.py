"""Profiles a model for the planner. `describe` makes a `ModelSpec` of any module, layer by layer, without allocating
memory.
"""

from meshwright.analysis.profile.model_spec import describe

__all__ = ["describe"]
