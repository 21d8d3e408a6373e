"""Placeholders for the modules of other pipeline stages."""
