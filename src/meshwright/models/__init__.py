"""Plain reference models: ordinary modules with no parallelism in them. `registry.build` makes one by name or from
sizes."""
