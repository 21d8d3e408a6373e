"""Shared memory between the ranks of one host: memory, collectives, and the queue of collectives in flight."""
