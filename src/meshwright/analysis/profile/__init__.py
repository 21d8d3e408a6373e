"""Profiles a model for the planner. `describe` makes a `ModelSpec` of any module, layer by layer, from training steps
on fake tensors.
"""

from meshwright.analysis.profile.model_spec import describe

__all__ = ["describe"]
