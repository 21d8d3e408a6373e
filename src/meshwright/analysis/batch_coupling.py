"""Finds modules whose result for one sample or token depends on other samples of the batch. With such a module the loss
depends on how the batch is divided over micro-batches and ranks, so the runtime refuses or checks plans that divide it.

`find_batch_norm` finds norms with batch statistics. `BatchCouplingDetector` finds modules that order all tokens of the
batch, for example to drop some. Such a module computes a running sum along a dimension that spans all tokens, and
compares the sum with a number, such as the capacity of an expert (GShard, arXiv 2006.16668, algorithm 1). Or it
computes a top-k along such a dimension, as when experts choose tokens (arXiv 2202.09368). A sort that only reorders
tokens, and is undone later, does not count.

The number of tokens follows from the input of the block: batch size x sequence length for (batch, sequence, features),
and batch size x pixels for images. A dimension of this size does not count if the dimensions before it already span all
tokens. Other numbers of tokens, such as batch size x patches, are multiples of the batch size and the first dimension
of a tensor. The detector sees only shapes. A check in the first step (runtime/preflight/batch_separability.py)
determines whether the dependence changes the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.analysis.example_inputs import EXAMPLE_BATCH
from meshwright.analysis.propagation import OpCall


def find_batch_norm(model: nn.Module) -> str:
    """Returns the path of the first norm that uses batch statistics in its current mode, '' if there is none.

    A norm in eval mode that has running statistics uses them for every sample, so it does not count. An instance norm
    counts if it updates running statistics, which are means over the batch.
    """
    return next((path for path, module in model.named_modules() if _couples_samples(module)), "")


def _couples_samples(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats and module.training
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)


RUNNING_SUM_OPS, TOP_K_OPS = (
    frozenset({"cumsum", "cumsum_", "cumprod", "logcumsumexp"}),
    frozenset({"topk", "kthvalue"}),
)
COMPARISON_OPS = frozenset(
    {"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "clamp", "clamp_", "minimum"}
)


@dataclass
class BatchCouplingDetector:
    """Follows the operations of one forward. `found` is the path of the first module that orders the tokens of the
    batch, '' if there is none.
    """

    found: str = ""
    positions: set[int] = field(default_factory=set)
    """Ids of the tensors that are computed from a running sum or a top-k over all tokens."""
    tokens: set[int] = field(default_factory=set)
    """Possible numbers of tokens of the model's inputs."""

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """Records the possible numbers of tokens of `inputs`, the inputs of the model."""
        for tensor in inputs:
            self.tokens |= possible_token_counts(tensor.shape) if tensor.is_floating_point() else {tensor.numel()}

    def follow(
        self,
        call: OpCall,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        where: str,
        block: torch.Tensor | None,
    ) -> None:
        """Follows one operation with the input tensors `given`.

        `where` is the path of the innermost running module. `block` is the input of the running block, None outside of
        all blocks.
        """
        tokens = self.tokens if block is None else possible_token_counts(block.shape)
        name = call.name.strip("_")
        if name in RUNNING_SUM_OPS | TOP_K_OPS and given and given[0].ndim:
            dim = call.argument(2 if name in TOP_K_OPS else 1, "dim", -1)
            if isinstance(dim, int) and spans_all_tokens(given[0].shape, dim % given[0].ndim, tokens):
                if name in TOP_K_OPS:
                    self.found = self.found or where
                self.positions.update(id(tensor) for tensor in outputs)
                return
        if any(id(tensor) in self.positions for tensor in given):
            if name in COMPARISON_OPS:
                self.found = self.found or where
            self.positions.update(id(tensor) for tensor in outputs)


def possible_token_counts(shape: torch.Size | tuple[int, ...]) -> set[int]:
    """Returns the possible numbers of tokens in a block's input of `shape`. The feature dimension is the last one, or
    the second one for images.

    >>> [sorted(possible_token_counts(shape)) for shape in ((2, 64, 16), (128, 16), (2, 8, 4, 4))]
    [[128], [128], [32, 64]]
    """
    return {
        math.prod(shape) // shape[at] for at in (-1, *([1] if len(shape) > 3 else [])) if len(shape) > 1 and shape[at]
    }


def spans_all_tokens(shape: torch.Size | tuple[int, ...], dim: int, tokens: set[int]) -> bool:
    """Returns whether dimension `dim` of a tensor of `shape` spans all samples or all tokens of the example. `tokens`
    are the possible numbers of tokens. A dimension of EXAMPLE_BATCH elements spans all samples if it is the first of
    several. A first dimension whose size is a multiple of EXAMPLE_BATCH may be the patches of all samples. A dimension
    with as many elements as tokens spans all tokens, unless the dimensions before it already do.

    >>> spans_all_tokens((128, 8), 0, {128}), spans_all_tokens((8, 128), 1, {128})
    (True, True)
    >>> spans_all_tokens((2, 64, 128), 2, {128}), spans_all_tokens((128, 128), 1, {128})
    (False, False)
    >>> spans_all_tokens((2, 8), 0, {128}), spans_all_tokens((64, 2), 1, {128}), spans_all_tokens((18, 8), 0, {128})
    (True, False, True)
    """
    if shape[dim] == EXAMPLE_BATCH:
        return dim == 0 and len(shape) > 1
    if dim == 0 and shape[0] and shape[0] % EXAMPLE_BATCH == 0:
        return True
    return any(shape[dim] == count and math.prod(shape[:dim]) % count for count in tokens)
