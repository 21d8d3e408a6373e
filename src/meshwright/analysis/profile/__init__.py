"""A live model to what the planner reads: `describe` fills a `ModelSpec` from any module, layer by layer, without
memory."""

from meshwright.analysis.profile.model_spec import describe

__all__ = ["describe"]
