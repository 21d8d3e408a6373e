"""Provides what every other package depends on: errors, units, and strict reading of JSON and YAML. It knows nothing
of training."""
