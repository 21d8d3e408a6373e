"""Keeps a run alive: starts ranks, watches them, names the one that failed, stops them in time, leaves no orphan. No
torch."""
