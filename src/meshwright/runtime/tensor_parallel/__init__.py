"""Implements tensor parallelism, sequence parallelism and a vocabulary that is split over ranks, on local tensors."""
