"""Runs pipeline parallelism: the stages of an unmodified model, the messages between ranks, and the schedule."""
