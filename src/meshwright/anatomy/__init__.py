"""How any model is understood, by structure: its blocks, embedding, head, and what tensor parallelism shards."""

from meshwright.anatomy.layers import layers
from meshwright.anatomy.nouns import Anatomy, Region, Split, intervals, local_slice
from meshwright.anatomy.read import read
from meshwright.anatomy.regions import is_plain

__all__ = ["Anatomy", "Region", "Split", "intervals", "is_plain", "layers", "local_slice", "read"]
