"""Recompute and offload of saved activations."""
