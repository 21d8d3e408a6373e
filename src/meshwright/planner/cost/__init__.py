"""Computes the memory and the step time of plans by formulas with sources. The arrays cover many plans at once. The
search, the simulation and the reports use this cost model. It uses NumPy and does not import torch."""
