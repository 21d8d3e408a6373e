"""Plans jobs: reads inputs, computes memory and time of plans, searches plans, simulates steps, and validates the cost
model. The package does not import torch."""
