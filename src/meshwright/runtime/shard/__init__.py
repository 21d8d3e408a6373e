"""Stores the optimizer's shard of a flat parameter group: main weights and optimizer states, also in low precision or
offloaded."""
