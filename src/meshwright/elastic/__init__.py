"""Runs a job fault-tolerantly: starts ranks, watches them, diagnoses failures, restarts the job, and stops it on
request without orphan processes. This package does not import torch."""
