"""Expert parallelism: the placement of experts, token dispatch, and load balancing."""
