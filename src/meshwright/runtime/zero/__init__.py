"""Data parallelism and ZeRO: flat parameter groups, their gradients, and the reducer."""
