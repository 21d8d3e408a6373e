"""Records how every tensor of the model is divided over ranks: global shapes, tensor-parallel splits, expert ranks, and
stages.

The build writes the table once, while the model is still full (build/passes/describe_shards.py). The code for
checkpoints, norms, full-tensor updates and stochastic rounding reads the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from meshwright.analysis.graph import TpSplit, shard_intervals


@dataclass(frozen=True)
class ShardSpec:
    """Describes how one parameter or buffer is divided over ranks."""

    global_shape: torch.Size
    tp_split: TpSplit | None = None
    """How tensor ranks split the tensor; None if each tensor rank stores it in full."""
    tp_index: int = 0
    """The index of this rank in the group of tensor ranks that split or replicate the tensor."""
    tp_ranks: int = 1
    """The size of the group of tensor ranks that split or replicate the tensor."""
    is_expert: bool = False
    """Whether expert ranks divide the first dimension of the tensor."""
    expert_index: int = 0
    """The index of this rank among the expert ranks."""
    stages: tuple[int, ...] = (0,)
    """The stages that compute with the tensor, in order."""
    is_packed: bool = False
    """Whether the tensor is the bytes of a frozen weight in 4 bits (analysis/nf4.py)."""

    def intervals(self, index: int | None = None) -> tuple[tuple[int, int], ...]:
        """Returns the [start, stop) ranges along the split dimension that tensor rank `index` stores (default: this
        rank). Returns () if the tensor is not split."""
        if self.tp_split is None:
            return ()
        size = self.tp_split.parts or self.global_shape[self.tp_split.dim]
        return shard_intervals(size, self.tp_index if index is None else index, self.tp_ranks)

    def expert_offset(self, local_numel: int) -> int:
        """Returns the number of elements of this tensor that earlier expert ranks store. `local_numel`: the number that
        each expert rank stores. Returns 0 for tensors that are not experts."""
        return self.expert_index * local_numel


@dataclass(frozen=True)
class ShardTable:
    """Maps the names of all parameters of the whole model, and of all buffers of its state dict, to their `ShardSpec`,
    in the model's order."""

    params: Mapping[str, ShardSpec] = field(default_factory=dict)
    buffers: Mapping[str, ShardSpec] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns the global shape of each parameter by name."""
        return {name: spec.global_shape for name, spec in self.params.items()}

    @cached_property
    def buffer_shapes(self) -> dict[str, torch.Size]:
        """Returns the global shape of each buffer of the state dict by name."""
        return {name: spec.global_shape for name, spec in self.buffers.items()}
