"""Data sets: text, token arrays or generated images become batches of tensors.

Guarantees:
- The order of samples is a pure function of the seed. It is the same under every plan and after every restart.
"""
