"""meshwright.runtime.shard."""
