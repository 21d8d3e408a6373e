"""Computes memory and seconds of plans with sourced formulas, vectorised over plans. The package uses NumPy and does
not import torch."""
