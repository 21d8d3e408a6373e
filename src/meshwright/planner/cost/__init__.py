"""What a plan takes: formulas with their sources, from (job, plans) to memory and seconds, vectorised over plans.
NumPy, no torch."""
