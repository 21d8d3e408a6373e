"""Runs a job with fault tolerance: starts ranks, watches them, diagnoses failures, restarts the ranks, and stops them
on request. The commands of `meshwright` use it. This package does not import torch."""
