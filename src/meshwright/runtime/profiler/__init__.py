"""Profiles the devices of a cluster and the links between them."""
