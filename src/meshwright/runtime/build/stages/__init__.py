"""The pipeline stages of a model: the layers of each stage, and the layers that this rank stores."""
