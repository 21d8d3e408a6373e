"""Stochastic rounding of float32 to bfloat16: up or down, with the probabilities that make the mean exact.

Rule: the lower 16 bits of a float32 are what bfloat16 drops; 16 random bits are added to them before they are dropped, so that the carry
rounds away from zero with probability (dropped bits) / 2^16. Infinities and NaN stay what they are.

[Note: random bits of an element] The bits are a hash of (seed, step, name of the tensor, place of the element in the whole tensor), so that
an element is rounded alike under every plan: whoever holds it, on whatever rank, in whatever order. No generator has a state to save.
The hash is MurmurHash3's finalizer, twice; 32-bit words in int64, whose products wrap.

Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015; Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF

TILE = 1 << 18
"""Elements rounded at a time on a CPU: their hashes stay in the cache."""


class Places(NamedTuple):
    """Where a run of a flat buffer lies in its whole tensor `name`: `length` elements of the local tensor from `start` on.

    Along one dimension the local tensor holds `rows` (indices in the whole one) of `size`, with `inner` elements behind each;
    `rows` None: the local tensor is a run of the whole one that begins at `before`.
    """

    name: str
    at: int
    start: int
    length: int
    before: int = 0
    rows: torch.Tensor | None = None
    size: int = 0
    inner: int = 1

    def indices(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Places in the whole tensor of the elements [first, last) of this run."""
        local = torch.arange(self.start + first, self.start + last, dtype=torch.int64, device=device)
        if self.rows is None:
            return local.add_(self.before)
        block, row = self.inner * len(self.rows), torch.div(local, self.inner, rounding_mode="floor")
        outer, inside = torch.div(local, block, rounding_mode="floor"), local % self.inner
        return (outer * self.size + self.rows.to(device)[row % len(self.rows)]) * self.inner + inside + self.before


def key_of(*parts: object) -> tuple[int, int]:
    """Two 32-bit words of anything that has a text.

    >>> key_of(1, 2) == key_of(1, 2), key_of(1, 2) == key_of(12)
    (True, False)
    """
    digest = hashlib.blake2b("\\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def bits(indices: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """16 random bits for each element of `indices` (int64), as int32."""
    mixed = _finish(indices & _WORD ^ key[0])
    mixed = _finish(mixed.add_(indices >> 32).add_(key[1]).bitwise_and_(_WORD))
    return (mixed >> 16).to(torch.int32)


def _finish(word: torch.Tensor) -> torch.Tensor:
    word = word ^ (word >> 16)
    word.mul_(0x85EBCA6B).bitwise_and_(_WORD)
    word.bitwise_xor_(word >> 13)
    word.mul_(0xC2B2AE35).bitwise_and_(_WORD)
    return word.bitwise_xor_(word >> 16)


def rounded(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Flat float32 `values` as bfloat16."""
    raw = values.view(torch.int32)
    up = (raw + random).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def within(places: Sequence[Places], taken: slice) -> Iterator[Places]:
    """What the elements `taken` have of them, counted from there."""
    for place in places:
        first, last = max(place.at, taken.start), min(place.at + place.length, taken.stop)
        if first < last:
            yield place._replace(at=first - taken.start, start=place.start + first - place.at, length=last - first)


def round_into(out: torch.Tensor, values: torch.Tensor, places: Sequence[Places], *key: object) -> None:
    """Flat bfloat16 `out` becomes the flat float32 `values`, rounded; what lies between the tensors becomes zero."""
    longest = TILE if values.device.type == "cpu" else max(values.numel(), 1)
    out.zero_()
    for place in places:
        words = key_of(*key, place.name)
        for first in range(0, place.length, longest):
            last = min(first + longest, place.length)
            taken = slice(place.at + first, place.at + last)
            out[taken] = rounded(values[taken], bits(place.indices(first, last, values.device), words))
