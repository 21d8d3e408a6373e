"""One step of training on one rank: its state, its inputs, its passes, and the checks of these."""
