"""Proof runs: loss and gradients of a plan compared with those of one device."""
