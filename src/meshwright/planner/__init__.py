"""Plans jobs: reads inputs, computes costs, searches plans, simulates steps, and validates the cost model."""
