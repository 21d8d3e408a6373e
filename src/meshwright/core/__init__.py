"""What everything stands on: errors, units, and strict reading of JSON and YAML. Knows nothing of training."""
