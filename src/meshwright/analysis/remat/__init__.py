"""Selective recompute (rematerialisation) of one block: a tape of recomputable operations, and a min-cut plan that
decides what to save.
"""
