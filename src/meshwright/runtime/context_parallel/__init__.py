"""Context parallelism: the ranks of a group store parts of a sequence and attend over all of it.

[Note: pieces of a sequence] Every context rank calls the model with the whole batch, so that the model's own code makes
masks, positions and rotary tables for the whole sequence. At the first block the hidden state is cut to this rank's
piece. The other arguments of each block are cut too (blocks.py, blocks.py). In the blocks,
scaled_dot_product_attention attends over all pieces with the whole mask (attention.py, attention.py, or both). The
layers after the blocks work on the piece. Labels are first shifted and then cut. The gradient of every parameter is a
sum over pieces. So context ranks reduce gradients and shard optimizer states as data ranks do.

If another operation in a block mixed positions, the result would be wrong. So before anything is changed, verify.py
compares a run on pieces with a run on the whole sequence, with real values. If they differ, the plan is refused.
"""
