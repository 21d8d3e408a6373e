"""Gradients of large weights in a proof, as products with a few random columns.

The gradient of a weight W is as large as W, and only compared. Here a layer with W computes with a constant W and adds a product of zeros,
so that the output is the same and the zeros get a projection of W's gradient G:

| dimension that ranks share | zeros Q | added to the layer x W^T | gradient of Q |
|---|---|---|---|
| 0, or none | (rows, COLUMNS) | (x P) Q^T | G P |
| 1 | (COLUMNS, columns) | (x Q^T) P^T | P^T G |

A rank's share of G has a share of the projection along the same dimension, and sums stay sums. Where W is used in another way, its gradient
is computed whole and projected. Two gradients that differ have equal projections with probability 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.anatomy.nouns import Split

COLUMNS = 8


class Projected(TorchFunctionMode):
    """While it is entered, layers with one of `weights`, which are matrices, give projections of its gradient. `splits`: how ranks share them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], splits: Mapping[str, Split]) -> None:
        super().__init__()
        self.weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.probes = {id(weight): _Probe(name, weight, splits) for name, weight in self.weights.items()}

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = PLACES.get(function, len(args))
        probe = self.probes.get(id(args[place])) if place < len(args) else None
        if probe is None or (function is functional.embedding and not probe.looks_up(args, kwargs)):
            return function(*args, **kwargs)
        result = function(*args[:place], probe.weight.detach(), *args[place + 1 :], **kwargs)
        if function is functional.linear:
            return result + probe.of_linear(args[0])
        if function is torch.addmm:
            return result + kwargs.get("alpha", 1) * probe.of_product(args[1])
        return result + function(args[0], probe.zeros, *args[2:], **kwargs) @ probe.random.T

    def leaves(self) -> dict[str, torch.Tensor]:
        """The zeros of each weight, by its name."""
        return {name: self.probes[id(weight)].zeros for name, weight in self.weights.items()}

    def projection(self, name: str, whole: torch.Tensor | None, projected: torch.Tensor | None) -> torch.Tensor | None:
        """Of the gradient of a weight: `whole` came to the weight itself, `projected` to its zeros; None where it got none."""
        if whole is None:
            return projected
        probe = self.probes[id(self.weights[name])]
        found = probe.random.T @ whole if probe.dim else whole @ probe.random
        return found if projected is None else found + projected


PLACES: dict[Any, int] = {functional.linear: 1, functional.embedding: 1, torch.addmm: 2}
"""Functions of layers, and which of their arguments is the weight."""


class _Probe:
    """The zeros of one weight, and the random matrix that its gradient is multiplied by: the same for the whole and for every rank."""

    def __init__(self, name: str, weight: torch.Tensor, splits: Mapping[str, Split]) -> None:
        self.weight, self.dim = weight, splits[name].dim if name in splits else 0
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        rows, columns = weight.shape
        self.random = torch.randn(rows if self.dim else columns, COLUMNS, generator=random, dtype=torch.float64).to(weight)
        self.zeros = weight.new_zeros((COLUMNS, columns) if self.dim else (rows, COLUMNS)).requires_grad_()

    def looks_up(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether an embedding is a plain lookup: one that also scales rows, or gives sparse gradients, is left alone.

        Behind the weight, arguments are padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse.
        """
        odd = (*args[3:4], *args[5:], *(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")))
        return self.dim == 0 and not any(odd)

    def of_linear(self, given: torch.Tensor) -> torch.Tensor:
        first, second = (self.zeros, self.random) if self.dim else (self.random.T, self.zeros)
        return functional.linear(functional.linear(given, first), second)

    def of_product(self, given: torch.Tensor) -> torch.Tensor:
        """Of x W: layers that hold their weight the other way round."""
        return given @ self.random @ self.zeros if self.dim else given @ self.zeros @ self.random.T
