"""Context parallelism: the ranks of a group store parts of a sequence and attend over all of it.

[Note: pieces of a sequence] Every context rank calls the model with the whole batch, so that the model's own code makes
masks, positions and rotary tables for the whole sequence. At the first block the hidden state is cut to this rank's
piece, and so are the other arguments of each block (load_balance.py, blocks.py). In the blocks,
scaled_dot_product_attention attends over all pieces with the whole mask (ring.py, ulysses.py, or both). The layers
after the blocks work on the piece; labels are shifted first and then cut. The gradient of every parameter is a sum over
pieces: context ranks reduce gradients and shard optimizer states as data ranks do.

Any other operation in a block that mixes positions would be wrong. Before anything is changed, verify.py compares the
model on a piece with the model on the whole, with real values. If they differ, the plan is refused."""
