"""Data parallelism and ZeRO: flat units of parameters, their gradients, their masters, and what reduces them."""
