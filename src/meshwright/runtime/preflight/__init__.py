"""meshwright.runtime.preflight."""
