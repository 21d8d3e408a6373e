"""Profiles devices and links."""
