"""The optimizer step of sharded parameters: full tensors, low precision, offload, and the kind of rule that an
optimizer follows."""
