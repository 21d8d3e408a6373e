"""Provides what all other packages use: errors, messages in two languages, quantities, strict JSON and YAML, files, and
communication between processes. The package depends on no other package of the project."""
