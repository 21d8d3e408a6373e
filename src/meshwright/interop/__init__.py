"""Configurations of other training systems: export of jobs and plans, import, and plans for another system."""
