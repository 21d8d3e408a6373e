"""Reference models: ordinary modules without any parallelism. `registry.build_reference_model` makes one from its
sizes.
"""
