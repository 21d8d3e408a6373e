"""meshwright.runtime.wgrad."""
