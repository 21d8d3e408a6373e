"""What gradients become on the wire between hosts, where the workload asks for fewer bytes and accepts another result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.base.codec import Noun

BLOCK = 256
"""Elements that share a scale in int8."""


class Compression(Noun):
    """`kind`: 2 bytes an element, 1 byte and a scale for each block, or two thin factors of each matrix.

    >>> Compression(kind="int8").bytes_per_element
    1.015625
    """

    kind: Literal["bf16", "int8", "low-rank"]
    rank: int = Field(default=4, ge=1, description="columns of the factors of low-rank")

    @property
    def bytes_per_element(self) -> float:
        """Of a large vector; of low-rank what is left when no tensor is a matrix."""
        return {"bf16": 2.0, "int8": 1.0 + 4.0 / BLOCK}.get(self.kind, 4.0)
