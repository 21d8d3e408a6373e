"""Parses user input to specs: models, clusters, jobs and plans.

Each error is one line that names the place, the numbers and the remedy.
"""
