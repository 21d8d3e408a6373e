"""Attention over all pieces of a sequence: queries stay, keys and values travel, and what each piece gives is merged exactly.

Under a causal mask rank r's queries (chunks r and 2c - 1 - r) see of rank s's keys: both chunks causally for s = r; the front chunk for s < r;
both, from the back chunk's queries only, for s > r. Each of these is half of all pairs: every turn costs every rank the same. With a mask
given as a tensor its own block is taken, and passed over where nothing is seen. Forward keeps this rank's queries, keys, values, output and
log-sum-exp; backward lets keys and values travel again (travel.py, kernel.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from meshwright.base.errors import InputError
from meshwright.parallel.context import kernel
from meshwright.parallel.context.call import Call
from meshwright.parallel.context.pieces import Pieces
from meshwright.parallel.context.travel import Travel

_ALL = slice(None)


class Block(NamedTuple):
    """Which queries meet which keys of a piece, and how."""

    rows: slice
    columns: slice
    causal: bool = False
    bias: torch.Tensor | None = None


class Sight(NamedTuple):
    """What this rank's queries may see: everything, what lies before them, or what `mask` (.., T or 1, T or 1) says."""

    pieces: Pieces
    causal: bool
    mask: torch.Tensor | None
    length: int

    def of(self, source: int, dtype: torch.dtype) -> Block | None:
        """Of rank `source`'s piece; None for nothing."""
        index, half = self.pieces.index, self.length // self.pieces.ranks // 2
        if self.mask is not None:
            bias = kernel.bias_of(self._block(self.mask, source), dtype)
            return None if bool((bias == -torch.inf).all()) else Block(_ALL, _ALL, bias=bias)
        if not self.causal:
            return Block(_ALL, _ALL)
        if source == index:
            return Block(_ALL, _ALL, causal=True)
        return Block(_ALL, slice(0, half)) if source < index else Block(slice(half, None), _ALL)

    def _block(self, mask: torch.Tensor, source: int) -> torch.Tensor:
        here = self.length // self.pieces.ranks
        for dim, owner in ((-2, self.pieces), (-1, self.pieces.of(source))):
            mask = owner.cut(mask, dim) if mask.shape[dim] == self.length else mask
        mask = mask.expand(*mask.shape[:-2], here, here)
        return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def attend(call: Call, pieces: Pieces, travel: Travel) -> torch.Tensor:
    """(B, H, T / c, Dv): this rank's rows of the attention over the whole sequence."""
    length = call.query.shape[-2] * pieces.ranks
    call.check(length)
    if call.dropout:
        raise InputError(
            f"cp with a ring cannot repeat the draws of dropout inside attention ({call.dropout:g}): set it to 0, or let the plan say ulysses"
        )
    sight = Sight(pieces, call.causal, call.mask, length)
    output: torch.Tensor = _Ring.apply(call.query, call.key, call.value, call.scale, sight, travel)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sight: Sight, travel: Travel
    ) -> torch.Tensor:
        widths = key.shape[-1], value.shape[-1]
        merged = kernel.Merged(query, value.shape[-1])
        for source, piece in travel.visits(_joined(key, value)):
            for block, part in _parts(query, piece.split(widths, -1), scale, sight, source):
                merged.add(block.rows, *kernel.forward(part))
        output, total = merged.result()
        ctx.save_for_backward(query, key, value, output, total)
        ctx.scale, ctx.sight, ctx.travel = scale, sight, travel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        widths = key.shape[-1], value.shape[-1]
        of_query = torch.zeros_like(query, dtype=total.dtype)

        def share(source: int, piece: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(piece, dtype=total.dtype)
            for block, part in _parts(query, piece.split(widths, -1), ctx.scale, ctx.sight, source):
                rows = block.rows
                shares = kernel.backward(part, gradient[..., rows, :], output[..., rows, :], total[..., rows])
                of_query[..., rows, :].add_(shares[0])
                found[..., block.columns, :].copy_(_joined(*shares[1:]))
            return found

        of_key, of_value = ctx.travel.collect(_joined(key, value), share).split(widths, -1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _joined(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message (B, G, T, D + Dv)."""
    return torch.cat([key, value], -1)


def _parts(
    query: torch.Tensor, piece: tuple[torch.Tensor, ...], scale: float, sight: Sight, source: int
) -> Iterator[tuple[Block, kernel.Part]]:
    block = sight.of(source, query.dtype)
    if block is not None:
        key, value = (tensor[..., block.columns, :] for tensor in piece)
        yield block, kernel.Part(query[..., block.rows, :], key, value, scale, block.causal, block.bias)
