"""Saves, verifies and loads distributed checkpoints for the trainer and the command line. A checkpoint that was saved
under one parallel layout can be loaded under any layout.

The entry points are:
- `save.save_checkpoint` saves, and `load.load_checkpoint` loads, the shards of every rank;
- `retention.newest_checkpoint` and `retention.prune_checkpoints` manage a folder of checkpoints;
- `verify.verify_checkpoint` verifies a checkpoint;
- `load.iter_full_tensors` reads full tensors;
- `huggingface` exports and imports weights;
- `memory_checkpoint` stores the last steps in host memory.

Guarantees:
- Every byte of a checkpoint is covered by a digest.
- Nothing is pickled.

[Note: file layout] FOLDER/step-00000100/ contains one file rank-00003.safetensors for each rank, and manifest.json. The
manifest has these entries:
- the step, the world size and the plan;
- for each tensor its shape, type and shards (file, key, offset, xxh3);
- for each file its size and the xxh3 of its header;
- the state of the trainer;
- its own digest.
"""
