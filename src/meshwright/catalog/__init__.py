"""Known models, devices, links and clusters: data files with their sources. Knows nothing of the rest of the
project."""
