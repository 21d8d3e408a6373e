"""Checks that a plan computes the same as one device. They run before training steps count."""
