"""Exchanges positions for heads (Ulysses). One all-to-all gives each context rank some heads for the whole sequence.
torch computes attention, and another all-to-all restores the pieces of the sequence.

[Note: both] If only u neighbours of c context ranks exchange heads, each rank has some heads for a longer piece: the
front chunks of the u ranks in order, then their back chunks. This is the piece of rank c div u among c / u ranks. These
ranks form a ring (`attending`). Key-value heads are repeated until the number of ranks divides them, which adds at most
one head per rank. All features of torch's attention work, including dropout: each rank draws for its own heads.
Sources:
Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3; Fang and Zhao, Unified Sequence Parallelism, arXiv
2405.07719.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.linear_map import linear_map
from meshwright.runtime.context_parallel.kernels import SdpaCall, torch_sdpa
from meshwright.runtime.context_parallel.load_balance import HeadTailSplit


class UlyssesExchange(NamedTuple):
    """The group that exchanges heads and positions, the total number of pieces of the sequence, and the attention
    function that runs between the two exchanges."""

    group: CommGroup
    cuts: int
    attending: Callable[[SdpaCall], torch.Tensor] = torch_sdpa


def ulysses_attention(call: SdpaCall, pieces: HeadTailSplit, way: UlyssesExchange) -> torch.Tensor:
    """Returns this rank's rows of the attention over the whole sequence, (B, H, T / c, Dv) for c context ranks.
    `pieces` is the split among the ranks that exchange heads."""
    ranks, heads = pieces.ranks, call.query.shape[1]
    call.check(call.query.shape[-2] * way.cuts)
    if heads % ranks:
        part = f"ulysses({ranks})" if way.cuts > ranks else f"cp({ranks})"
        raise InputError(
            Message(
                "ulysses: {part} does not divide the {heads} heads of a tensor rank: choose another, or the ring",
                part=part,
                heads=heads,
            )
        )
    times = ranks // math.gcd(ranks, call.key.shape[1])
    key, value = (x.repeat_interleave(times, 1) if times > 1 else x for x in (call.key, call.value))
    there, back = partial(sequence_to_heads, pieces=pieces, way=way), partial(heads_to_sequence, pieces=pieces, way=way)
    query, key, value = (linear_map(x, there, back) for x in (call.query, key, value))
    mask = call.mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
        mask = mask.narrow(-3, pieces.index * heads // ranks, heads // ranks)
    output = way.attending(SdpaCall(query, key, value, mask, call.dropout, call.causal, call.scale))
    return linear_map(output, back, there)


def sequence_to_heads(x: torch.Tensor, pieces: HeadTailSplit, way: UlyssesExchange) -> torch.Tensor:
    """Exchanges (B, H, T / c, D), all heads of a piece, for (B, H / c, T, D), some heads of all positions in order."""
    sent = x.unflatten(1, (pieces.ranks, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    async_collectives.all_to_all(received.view(-1), sent.view(-1), way.group).wait()
    return pieces.in_order(received.movedim(0, 2).flatten(2, 3), 2)


def heads_to_sequence(x: torch.Tensor, pieces: HeadTailSplit, way: UlyssesExchange) -> torch.Tensor:
    """Inverts `sequence_to_heads`. The memory layout of the result is (B, T / c, H, D), so that the heads of a position
    are contiguous without a copy."""
    sent = pieces.stacked(x, 2).unflatten(2, (pieces.ranks, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    async_collectives.all_to_all(received.view(-1), sent.view(-1), way.group).wait()
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)
