"""Meshwright: plan, prove, run and keep running the training of any PyTorch model on any cluster. Importing this imports no torch."""

__version__ = "0.1.0"
