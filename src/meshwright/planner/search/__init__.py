"""Searches all legal plans of a job for those that fit and are fastest, and explains why other plans lose. The search
is exact and vectorised."""
