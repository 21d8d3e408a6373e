"""Expert parallelism: who holds which experts, how tokens come to them, and the losses and loads of a mixture."""
