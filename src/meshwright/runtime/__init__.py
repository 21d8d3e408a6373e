"""The distributed runtime: one package per kind of parallelism. build/parallelize.py lists the build passes in
order."""
