"""Expert parallelism: which ranks store which experts, the dispatch of tokens to experts, and load balancing."""
