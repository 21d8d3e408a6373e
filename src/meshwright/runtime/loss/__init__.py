"""The loss of a training step: its definition, and cross-entropy over a sharded vocabulary."""
