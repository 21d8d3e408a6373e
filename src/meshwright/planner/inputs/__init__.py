"""Parses user input to specs: models, clusters, jobs and plans.

Each error is one line with the location, the numbers and the remedy.
"""
