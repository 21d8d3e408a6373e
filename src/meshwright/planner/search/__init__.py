"""Searches all legal plans of a job for the fastest plans that fit in memory, and explains why other plans are worse.
`plan` and the trials use it. The search is exact, and computes the cost of many plans at once with NumPy."""
