"""Keeps a run alive: starts ranks, watches them, diagnoses failures, restarts, and stops in time without orphan
processes. It does not import torch."""
