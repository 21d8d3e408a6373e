"""Norms with statistics over the samples that pass together: their loss depends on how a batch is divided.

Modules that give a token a place among all tokens that pass together: what a token gets then depends on which others
pass with it.

Rule: a running sum, or a choice of the largest, along a dimension that holds all tokens of the run, whose result is
compared with a number (the capacity of
an expert: GShard, arXiv 2006.16668, algorithm 1), or is the choice itself (tokens chosen by experts: arXiv 2202.09368).
A sort that
only says where rows are kept meanwhile is undone, and is none. How many tokens there are says what the block was given:
of (rows, places, features) the
rows times the places, of images the rows times their pixels. A dimension of that size behind ones that hold the tokens
already is of something else.
Seen in the run without memory; whether it ever bites numbers must say.
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
    """Path of the first module that takes statistics over the batch in the mode that it is in; '' where there is none.

    A norm in eval mode reads its running statistics, which are the same for every row.
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
    """`found`: the module that does it, '' where none was seen."""

    found: str = ""
    positions: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)
    """How many tokens the inputs of the model may have."""

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """The model is called with `inputs`."""
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
        """One operation. `where`: the innermost module that runs; `block`: what the block that runs was given, None
        outside of all."""
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
    """How many tokens there may be in a block's input: features stand last, or of images behind the rows.

    >>> possible_token_counts((2, 64, 16)), possible_token_counts((128, 16)), sorted(possible_token_counts((2, 8, 4, 4)))
    ({128}, {128}, [32, 64])
    """
    return {
        math.prod(shape) // shape[at] for at in (-1, *([1] if len(shape) > 3 else [])) if len(shape) > 1 and shape[at]
    }


def spans_all_tokens(shape: torch.Size | tuple[int, ...], dim: int, tokens: set[int]) -> bool:
    """Whether a dimension holds all rows, or all tokens.

    >>> spans_all_tokens((128, 8), 0, {128}), spans_all_tokens((8, 128), 1, {128}), spans_all_tokens((2, 64, 128), 2, {128}), spans_all_tokens((128, 128), 1, {128})
    (True, True, False, False)
    >>> spans_all_tokens((2, 8), 0, {128}), spans_all_tokens((64, 2), 1, {128})
    (True, False)
    """
    if shape[dim] == EXAMPLE_BATCH:
        return dim == 0 and len(shape) > 1
    return any(shape[dim] == count and math.prod(shape[:dim]) % count for count in tokens)
