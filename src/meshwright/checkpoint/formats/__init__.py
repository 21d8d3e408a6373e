"""Reads and writes checkpoints of other systems, for the trainer and `meshwright checkpoint`.

`detect.open_checkpoint` recognises the form of a checkpoint and returns a source that `load.load_checkpoint` reads. The
files `dcp`, `megatron` and `deepspeed` have one form each. `inert_pickle` reads pickled data without executing it.

Guarantees:
- Reading never executes code of a checkpoint: pickled objects become inert records, and a class that is not in the list
  of the form is refused.
- At most one saved shard or one full tensor is in memory at a time.
- A checkpoint with a missing or truncated file is refused before a tensor is read.
"""
