"""meshwright.runtime.loss."""
