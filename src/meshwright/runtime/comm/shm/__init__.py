"""Communication of CPU ranks on one host: shared memory, collectives, and the queue of collectives in flight."""
