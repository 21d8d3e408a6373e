"""meshwright.runtime.precision."""
