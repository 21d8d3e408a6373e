"""One training step on one rank: state, inputs, forward and backward passes, and checks."""
