"""Placeholders for modules of other ranks."""
