"""Checks of a plan against one device, before steps count."""
