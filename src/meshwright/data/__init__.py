"""Datasets: they make batches of tensors from text, token arrays or generated images.

Guarantees:
- The order of samples is a pure function of the seed. The order is equal under every plan and after every restart.
"""
