"""Checkpoints: saved state on disk, under any layout, loaded under any other, with the digest of every byte.

`save.save` and `load.load` (pieces of every rank), `folder.newest` and `folder.prune` (a folder of them),
`verify.verify` (one of them),
`load.full_tensors`, and `huggingface` (export, import). No pickle anywhere.

[Note: form] FOLDER/step-00000100/ holds rank-00003.safetensors of each rank and manifest.json: step, world, plan, for
each tensor its shape, type and
pieces (file, key, place, xxh3), for each file its size and the xxh3 of its header, the trainer's state, and the digest
of itself.
"""
