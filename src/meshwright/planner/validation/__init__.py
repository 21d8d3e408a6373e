"""Compares the cost model with published measurements: converts rows to jobs and plans, compares predicted with
measured values, and scores them by family."""
