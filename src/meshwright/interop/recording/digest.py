"""Digests of tensors: the numbers by which a recording and one device are compared.

A digest has DIRECTIONS random projections (analysis/random_projection.py) and, in its last element, the norm. It
depends only on the order of the elements and not on the shape or the name of the tensor. So the digest of a shard can
be compared with the digest of the same slice of the full tensor. The projections are linear: the projections of partial
sums add up to the projection of the sum, and the difference of two digests is the projection of the difference.
"""

from __future__ import annotations

import math

import torch

from meshwright.analysis.random_projection import PROJECTION_COLUMNS, flat_elements, project_flat, row_factors

DIRECTIONS = 8
DIGEST_SIZE = DIRECTIONS + 1
Digest = torch.Tensor
"""A float64 tensor of DIGEST_SIZE elements."""
MAX_CACHED_ROWS = 1 << 20
"""Row factors of larger tensors are drawn again for each digest. The cached factors of one size take up to 64 MiB."""


class Digester:
    """Computes digests without synchronizing with the device. The row factors are drawn once for each device."""

    def __init__(self) -> None:
        self.factors: dict[torch.device, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> Digest:
        """Returns the digest of a floating-point tensor on the device of the tensor."""
        flat = flat_elements(tensor)
        if not flat.numel():
            return torch.zeros(DIGEST_SIZE, dtype=torch.float64, device=flat.device)
        projected = project_flat(flat, self._rows(-(-flat.numel() // PROJECTION_COLUMNS), flat.device))
        return torch.cat([projected, torch.linalg.vector_norm(flat).double().view(1)])

    def _rows(self, rows: int, device: torch.device) -> torch.Tensor:
        """Returns the row factors of the first `rows` rows. Tensors of all sizes use the same factors. They are drawn
        in multiples of 1,024 rows, because torch draws short and long tensors in different ways."""
        known = self.factors.get(device)
        if known is None or len(known) < rows:
            size = 1024 << max(0, math.ceil(math.log2(rows / 1024)))
            known = torch.cat(
                [
                    row_factors(f"recording {block}", 1024 * PROJECTION_COLUMNS, DIRECTIONS)
                    for block in range(size // 1024)
                ]
            ).to(device)
            if size <= MAX_CACHED_ROWS:
                self.factors[device] = known
        return known[:rows]


def distance(one: Digest, two: Digest) -> float:
    """Returns an estimate of the norm of the difference of two tensors, or infinity if it is not finite."""
    found = float((one - two)[:DIRECTIONS].norm()) / math.sqrt(DIRECTIONS)
    return found if math.isfinite(found) else math.inf


def add_digests(parts: list[Digest]) -> Digest:
    """Returns the digest of the sum of tensors. The norm of the sum is unknown and is estimated by its projections."""
    total = torch.stack(parts).sum(0)
    total[-1] = total[:DIRECTIONS].norm() / math.sqrt(DIRECTIONS)
    return total


def scale_of(one: Digest, two: Digest) -> tuple[float, float]:
    """Returns the factor s for which s * `two` is nearest to `one`, and the relative distance that remains."""
    a, b = one[:DIRECTIONS], two[:DIRECTIONS]
    size = float(b @ b)
    factor = float(a @ b) / size if size else 0.0
    rest = float((a - factor * b).norm()) / max(float(a.norm()), 1e-300)
    return factor, rest
