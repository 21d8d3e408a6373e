"""meshwright.analysis.remat."""
