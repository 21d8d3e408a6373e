"""Provides what all other packages use: errors, units, and strict reading of JSON and YAML. The package does not depend
on training code."""
