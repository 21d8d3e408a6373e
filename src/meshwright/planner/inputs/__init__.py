"""Parses the user's input (job files, options, model and cluster descriptions) to the data types of meshwright.spec.
The commands and the Python API use it.

Each error message is one line with the location of the error, the numbers and the remedy.
"""
