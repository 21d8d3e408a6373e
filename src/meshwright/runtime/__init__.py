"""A model and a plan go in, a model that computes the same over many ranks comes out. One room per strategy; apply.py
shows the order."""
