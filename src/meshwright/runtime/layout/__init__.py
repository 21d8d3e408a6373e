"""meshwright.runtime.layout."""
