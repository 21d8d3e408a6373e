"""Proof runs, which compare the loss and the gradients under a plan with those of one device."""
