"""Tensor parallelism, sequence parallelism and the loss over a split vocabulary, on local tensors."""
