"""Offloads optimizer states, main weights, weights, gradients and activations to host memory and disk."""
