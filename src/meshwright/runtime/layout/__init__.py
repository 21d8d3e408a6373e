"""Modules that stand in for those of other ranks."""
