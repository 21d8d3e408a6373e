"""Context parallelism: each rank of a group computes one piece of the sequence, and attention reads all pieces.

[Note: pieces of a sequence] Every context rank calls the model with the whole batch. So the model's own code makes
masks, positions and rotary tables for the whole sequence. At the first block the hidden state is cut to this rank's
piece. The other arguments of each block are cut too (blocks.py). In the blocks, scaled_dot_product_attention attends
over all pieces with the whole mask (attention.py). The layers after the blocks work on the piece. Labels are first
shifted and then cut. The gradient of every parameter is a sum over pieces. So context ranks reduce gradients and shard
optimizer states as data-parallel ranks do.

If an operation other than attention mixed positions in a block, the result would be wrong. So before the model is
changed, verify.py compares a forward on pieces with a forward on the whole sequence, with real values. If the results
differ, the plan is refused.
"""
