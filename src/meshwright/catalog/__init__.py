"""Contains known models, devices, links, clusters and failure rates as data files with their sources. The planner and
the command line read them. The package imports nothing else of the project."""
