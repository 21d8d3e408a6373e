"""Runs a job fault-tolerantly: starts ranks, watches them, diagnoses failures, restarts the job, and stops it in time
without orphan processes. It does not import torch."""
