"""Implements data parallelism and ZeRO: flat parameter groups, their weights and gradients, and the reducer."""
