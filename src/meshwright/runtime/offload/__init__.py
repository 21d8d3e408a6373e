"""Offloading to CPU and NVMe: optimizer states, main weights, weights, gradients and activations."""
