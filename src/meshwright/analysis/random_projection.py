"""Projects tensors onto random directions: a few numbers that represent a tensor in comparisons.

A tensor is viewed as a matrix with PROJECTION_COLUMNS columns. Each direction is an outer product of row factors and
column factors. The row factors are seeded by a name, such as that of a parameter. The column factors are equal for all
tensors. The projection is linear: the projection of a sum is the sum of the projections, and the difference of two
projections is the projection of the difference. If two tensors differ, this projection is zero with probability 0. The
cost is one product with a narrow matrix. Source: random projections preserve norms, Johnson and Lindenstrauss, 1984.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

NUM_DIRECTIONS = 4
PROJECTION_COLUMNS = 1024
"""Number of consecutive elements that have the same row factor."""


def random_projection(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the projections of the gradient of parameter `name`, (NUM_DIRECTIONS,) in float64."""
    flat = flat_elements(gradient)
    return project_flat(flat, row_factors(name, flat.numel()).to(flat.device))


def flat_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of `tensor` as a vector in float64 if the tensor has this dtype, else in float32. A complex
    number becomes two elements, and a sparse tensor is made dense."""
    tensor = tensor.detach()
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat if flat.dtype == torch.float64 else flat.float()


class ChunkedProjection:
    """Computes the projections of one floating-point tensor whose elements arrive in parts, in order."""

    def __init__(self, name: str, elements: int) -> None:
        self.left = row_factors(name, elements)
        self.found = torch.zeros(NUM_DIRECTIONS, dtype=torch.float64)

    def add(self, first: int, part: torch.Tensor) -> None:
        """Adds the elements `part`. `first` is the index of its first element and must be a multiple of
        PROJECTION_COLUMNS."""
        flat = part.detach() if part.dtype == torch.float64 else part.detach().float()
        self.found += project_flat(flat, self.left[first // PROJECTION_COLUMNS :].to(flat.device)).cpu()


def project_flat(flat: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Returns the projections of the vector `flat` with the row factors `left`, (directions,) in float64."""
    right = column_factors(left.shape[1]).to(flat)
    whole = flat.numel() // PROJECTION_COLUMNS if flat.numel() > PROJECTION_COLUMNS else 0
    found = (
        (left[:whole] * (flat[: whole * PROJECTION_COLUMNS].view(whole, PROJECTION_COLUMNS) @ right).double()).sum(0)
        if whole
        else left.new_zeros(left.shape[1])
    )
    rest = flat[whole * PROJECTION_COLUMNS :]
    return found if not rest.numel() else found + left[whole] * (rest @ right[: rest.numel()]).double()


@lru_cache(maxsize=2)
def column_factors(directions: int = NUM_DIRECTIONS) -> torch.Tensor:
    """Returns the column factors of all gradients, (PROJECTION_COLUMNS, `directions`) in float64. They are cached for
    the passes of one check."""
    return torch.randn(PROJECTION_COLUMNS, directions, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def row_factors(name: str, elements: int, directions: int = NUM_DIRECTIONS) -> torch.Tensor:
    """Returns the row factors for parameter `name`, (rows, `directions`) in float64."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(-(-elements // PROJECTION_COLUMNS), directions, generator=random, dtype=torch.float64)
