"""How ranks exchange tensors: process groups, shared memory, both in tiers, and gradients in fewer bytes."""
