"""Reads text, token arrays and generated images as batches of tensors for the training loop.

Guarantees:
- The order of samples is a pure function of the seed. The order is equal under every plan and after every restart.
"""
