"""Contains known models, devices, links and clusters as data files with their sources. The package imports nothing else
of the project."""
