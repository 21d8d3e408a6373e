"""meshwright.runtime.recompute."""
