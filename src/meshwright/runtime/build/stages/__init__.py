"""The stages of a model: which layers they have, and what this rank stores of them."""
