"""One file per strategy. A model and a plan go in, a model that computes the same over many ranks comes out."""
