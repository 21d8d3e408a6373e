"""Communication between ranks: process groups, shared memory, hierarchical collectives, and gradient compression."""
