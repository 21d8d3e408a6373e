"""meshwright.runtime.profiler."""
