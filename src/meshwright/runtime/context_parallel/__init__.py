"""Context parallelism: the ranks of a group hold a sequence in pieces and attend over all of it. The model is an
ordinary one.

[Note: pieces of a sequence] Every context rank calls the model with the whole batch, so that masks, positions and
rotary tables are made by
the model's own code for the whole sequence, as pipeline stages do. At the first block the hidden state is cut to this
rank's piece, and so is
what each block is given beside it (pieces.py, blocks.py); torch's scaled_dot_product_attention inside the blocks
attends over all pieces, with
the whole mask (ring.py, ulysses.py, or both). What follows the blocks works on the piece, labels are shifted first and
then cut. Every parameter's
gradient is a sum over pieces: context ranks reduce gradients, and share states, as data ranks do.

What else in a block looks along the sequence would be wrong. So before anything is changed the model proves, with
numbers, that on a piece
it computes a piece of what it computes on the whole (proof.py); else the plan is refused.
"""
