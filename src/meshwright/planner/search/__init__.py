"""Searches all legal plans of a job for the fastest plans that fit in memory, and explains why other plans are worse.
The search is exact and vectorised."""
