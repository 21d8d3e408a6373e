"""The pipeline stages of a model: their layers, and the part of them that this rank stores."""
