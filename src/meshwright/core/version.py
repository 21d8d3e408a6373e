"""Defines the version of Meshwright. No other file contains it."""

__version__ = "0.1.0"
