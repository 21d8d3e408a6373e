"""Reference models: ordinary modules without any parallelism. `registry.build_reference_model` builds a model from its
sizes."""
