"""The cost model held against published measurements: rows to jobs and plans, predicted to measured, scores by
family."""
