"""meshwright.runtime.build."""
