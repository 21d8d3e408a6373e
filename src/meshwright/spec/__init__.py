"""Defines the specs: job = model + cluster + workload (the question), plan (the answer), estimate and record
(predicted, measured). The package has no I/O and no torch."""
