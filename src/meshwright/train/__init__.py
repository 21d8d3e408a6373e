"""The optimizer step, the training loop around it, and the processes that run it. This import does not import torch."""
