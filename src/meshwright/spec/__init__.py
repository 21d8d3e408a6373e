"""The nouns: job = model + cluster + workload (the question), plan (the answer), estimate and record (predicted,
measured). No I/O, no torch."""
