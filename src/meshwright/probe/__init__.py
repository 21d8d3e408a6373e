"""A live model to what the planner reads: `describe` fills a `ModelSpec` from any module, layer by layer, without memory."""

from meshwright.probe.model import describe

__all__ = ["describe"]
