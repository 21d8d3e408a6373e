"""How any model is understood, by structure: its blocks, embedding, head, and what tensor parallelism shards."""

from meshwright.anatomy.counts import HeadsTaken, resize, set_counts
from meshwright.anatomy.layers import layers
from meshwright.anatomy.nouns import Anatomy, Count, Experts, Region, Slice, Split, intervals, local_slice, share_of
from meshwright.anatomy.plain import is_convolution, is_plain
from meshwright.anatomy.read import read
from meshwright.anatomy.stacks import find_lists

__all__ = [
    "Anatomy", "Count", "Experts", "HeadsTaken", "Region", "Slice", "Split", "find_lists", "intervals", "is_convolution", "is_plain", "layers", "local_slice", "read", "resize",
    "set_counts", "share_of",
]  # fmt: skip
