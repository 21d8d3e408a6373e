"""Training: the optimizer step, the training loop and the processes of ranks. Importing this package does not import
torch."""
