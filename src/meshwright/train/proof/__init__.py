"""Proof runs: they compare loss and gradients of a plan with those of one device."""
