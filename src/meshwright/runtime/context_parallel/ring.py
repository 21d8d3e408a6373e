"""Ring attention: the context ranks exchange keys and values, and merge attention over all pieces exactly.

A piece is the keys and values of one rank. The pieces are exchanged in one of two ways:

    AllGatherKV  every rank gathers all pieces in one collective; gradients are summed by a reduce-scatter (Llama 3,
                 arXiv 2407.21783, section 3.3.2)
    RingKV       pieces go round the ring, one send and one receive per turn, overlapped with attention over the current
                 piece (Liu et al., arXiv 2310.01889). In backward, the gradient of a piece is sent one turn after the
                 piece. With c context ranks, it returns to the piece's own rank after c turns.

CPU ranks of one host use AllGatherKV, through shared memory. All other groups use RingKV, which overlaps the transfer
with attention and stores two pieces instead of c. Time of forward plus backward with 2 ranks and 8 heads of width 64:

    positions                    512        2,048
    shared memory, AllGatherKV   13.7 ms    127 ms
    gloo messages                14.4 ms    132 ms

Under a causal mask, rank r has the query chunks r and 2c - 1 - r. These queries attend to the keys of rank s as
follows:

- s = r: all queries attend to both chunks, causally;
- s < r: all queries attend to the front chunk of rank s only;
- s > r: the queries of the back chunk attend to both chunks of rank s, the queries of the front chunk to none.

In each case half of all (query, key) pairs are computed, so every turn takes equally long on every rank. If the call
has a mask tensor, the mask is cut to this rank's queries and the keys of rank s. A piece whose keys are all masked is
skipped. Forward saves this rank's queries, keys, values, output and log-sum-exp. Backward exchanges keys and values
again.

`ring_in_graph` is the same computation as an operator that torch.compile traces (comm/graph_collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.context_parallel import kernels
from meshwright.runtime.context_parallel.blocks import HeadTailSplit
from meshwright.runtime.context_parallel.kernels import SdpaCall
from meshwright.runtime.error_propagation import interruptible_wait

KVVisitor = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a rank index and the piece of that rank. Returns the contribution of this rank's queries to the gradient of the
piece."""


class KVExchange(Protocol):
    """Exchanges keys and values between the ranks of `group`. A `piece` (B, G, T / c, D + Dv) contains one rank's keys
    and values."""

    group: CommGroup

    def visits(self, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (rank index, piece) for every rank, this rank first."""
        ...

    def collect(self, piece: torch.Tensor, grad_of: KVVisitor) -> torch.Tensor:
        """Calls `grad_of` for the piece of every rank. Returns the gradient of this rank's `piece`, summed over the
        contributions of all ranks. Its dtype is that of the contributions, which may be wider than that of `piece`."""
        ...


class AllGatherKV:
    """Exchanges pieces by an all-gather, and sums gradients by a reduce-scatter."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group

    def visits(self, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields this rank's piece while the all-gather runs, and then the pieces of the other ranks in ring order."""
        group = self.group
        pieces = torch.empty(group.size, *piece.shape, dtype=piece.dtype, device=piece.device)
        gathering = async_collectives.all_gather(pieces.view(-1), piece.view(-1), group)
        yield group.index, piece
        gathering.wait()
        for turn in range(1, group.size):
            source = (group.index - turn) % group.size
            yield source, pieces[source]

    def collect(self, piece: torch.Tensor, grad_of: KVVisitor) -> torch.Tensor:
        """Calls `grad_of` for the pieces of all ranks, and then sums the results by one reduce-scatter."""
        grads: torch.Tensor | None = None
        for source, visited in self.visits(piece):
            found = grad_of(source, visited)
            if grads is None:
                grads = torch.empty(self.group.size, *found.shape, dtype=found.dtype, device=found.device)
            grads[source] = found
        assert grads is not None
        own = torch.empty_like(grads[0])
        async_collectives.reduce_scatter(grads.view(-1), own.view(-1), self.group).wait()
        return own


class RingKV:
    """Exchanges pieces in a ring: each rank receives from the previous rank and sends to the next rank."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self.next, self.last = (group.ranks[(group.index + step) % group.size] for step in (1, -1))

    def visits(self, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields pieces in ring order. While the caller uses one piece, this rank receives the next piece."""
        here = piece
        for turn in range(self.group.size):
            works, coming = self._pass_on(here) if turn < self.group.size - 1 else ([], here)
            yield (self.group.index - turn) % self.group.size, here
            self._wait(works)
            here = coming

    def collect(self, piece: torch.Tensor, grad_of: KVVisitor) -> torch.Tensor:
        """Passes partial sums of the gradients round the ring, each one turn after its piece."""
        works: list[dist.Work] = []
        coming: torch.Tensor | None = None
        for source, here in self.visits(piece):
            found = grad_of(source, here)
            self._wait(works)
            total = found if coming is None else found + coming
            works, coming = self._pass_on(total)
        self._wait(works)
        assert coming is not None
        return coming

    def _wait(self, works: list[dist.Work]) -> None:
        with self.group.timer.wait_timer, interruptible_wait(self.group.process_group):
            for work in works:
                work.wait()

    def _pass_on(self, tensor: torch.Tensor) -> tuple[list[dist.Work], torch.Tensor]:
        """Starts to send `tensor` to the next rank, and to receive the previous rank's tensor. Returns the handles to
        wait for, and the buffer that receives."""
        tensor = tensor.contiguous()
        coming = torch.empty_like(tensor)
        self.group.timer.sent += tensor.numel() * tensor.element_size()
        process = self.group.process_group
        ways = [dist.P2POp(dist.isend, tensor, self.next, process), dist.P2POp(dist.irecv, coming, self.last, process)]
        with interruptible_wait(process):
            return dist.batch_isend_irecv(ways), coming


def make_kv_exchange(group: CommGroup) -> KVExchange:
    """Returns the exchange for `group`: an all-gather in shared memory, or a ring over a process group."""
    return AllGatherKV(group) if group.process_group is None else RingKV(group)


_ALL_POSITIONS = slice(None)


class MaskBlock(NamedTuple):
    """The mask for the piece of one rank. The queries `rows` of this rank attend to the keys `columns` of the piece.
    `causal`: whether a query attends only to keys up to its own position. `bias` is added to the scores."""

    rows: slice
    columns: slice
    causal: bool = False
    bias: torch.Tensor | None = None


class MaskBlocks(NamedTuple):
    """The mask of this rank's queries for all keys. With `mask`, the queries attend to the keys that `mask` allows.
    Without it, they attend to all keys, or only to their own and previous positions if `causal`. `length` is the number
    T of positions, and `mask` is (..., T or 1, T or 1)."""

    pieces: HeadTailSplit
    causal: bool
    mask: torch.Tensor | None
    length: int

    def of(self, source: int, dtype: torch.dtype) -> MaskBlock | None:
        """Returns the mask for the piece of rank `source`. Returns None if `mask` masks all keys of the piece."""
        index, half = self.pieces.index, self.length // self.pieces.ranks // 2
        if self.mask is not None:
            bias = kernels.mask_to_bias(self._block(self.mask, source), dtype)
            return None if bool((bias == -torch.inf).all()) else MaskBlock(_ALL_POSITIONS, _ALL_POSITIONS, bias=bias)
        if not self.causal:
            return MaskBlock(_ALL_POSITIONS, _ALL_POSITIONS)
        if source == index:
            return MaskBlock(_ALL_POSITIONS, _ALL_POSITIONS, causal=True)
        return (
            MaskBlock(_ALL_POSITIONS, slice(0, half))
            if source < index
            else MaskBlock(slice(half, None), _ALL_POSITIONS)
        )

    def _block(self, mask: torch.Tensor, source: int) -> torch.Tensor:
        here = self.length // self.pieces.ranks
        for dim, owner in ((-2, self.pieces), (-1, self.pieces.of(source))):
            mask = owner.cut(mask, dim) if mask.shape[dim] == self.length else mask
        mask = mask.expand(*mask.shape[:-2], here, here)
        return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def ring_attention(call: SdpaCall, pieces: HeadTailSplit, exchange: KVExchange) -> torch.Tensor:
    """Returns the attention of this rank's queries to the whole sequence: (B, H, T / c, Dv) for c context ranks.

    Raises:
        InputError: the call has dropout, is not self-attention over one sequence, or has a mask that needs a gradient
            or does not cover the sequence.
    """
    length = call.query.shape[-2] * pieces.ranks
    call.check(length)
    if call.dropout:
        raise InputError(
            Message(
                "cp: ring attention does not support dropout inside attention ({dropout:g}): set it to 0, or use a "
                "plan with ulysses",
                dropout=call.dropout,
            )
        )
    output: torch.Tensor
    if torch.compiler.is_compiling():
        key = exchange.group.key
        output, _ = ring_in_graph(call.query, call.key, call.value, call.mask, call.scale, call.causal, key)
        return output
    mask_blocks = MaskBlocks(pieces, call.causal, call.mask, length)
    output = _RingAttention.apply(call.query, call.key, call.value, call.scale, mask_blocks, exchange)
    return output


def _ring_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask_blocks: MaskBlocks,
    exchange: KVExchange,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the log-sum-exp."""
    widths = key.shape[-1], value.shape[-1]
    merged = kernels.LseMerge(query, value.shape[-1])
    for source, piece in exchange.visits(_concat_kv(key, value)):
        for block, part in _partial_attentions(query, piece.split(widths, -1), scale, mask_blocks, source):
            merged.add(block.rows, *kernels.attention_forward(part))
    return merged.result()


def _ring_backward(
    gradient: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    scale: float,
    mask_blocks: MaskBlocks,
    exchange: KVExchange,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. `saved`: these tensors, the output and the log-sum-exp."""
    query, key, value, output, total = saved
    widths = key.shape[-1], value.shape[-1]
    of_query = torch.zeros_like(query, dtype=total.dtype)

    def grad_of(source: int, piece: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(piece, dtype=total.dtype)
        for block, part in _partial_attentions(query, piece.split(widths, -1), scale, mask_blocks, source):
            rows = block.rows
            grads = kernels.attention_backward(part, gradient[..., rows, :], output[..., rows, :], total[..., rows])
            of_query[..., rows, :].add_(grads[0])
            found[..., block.columns, :].copy_(_concat_kv(*grads[1:]))
        return found

    of_key, of_value = exchange.collect(_concat_kv(key, value), grad_of).split(widths, -1)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        mask_blocks: MaskBlocks,
        exchange: KVExchange,
    ) -> torch.Tensor:
        output, total = _ring_forward(query, key, value, scale, mask_blocks, exchange)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.scale, ctx.mask_blocks, ctx.exchange = scale, mask_blocks, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _ring_backward(gradient, ctx.saved_tensors, ctx.scale, ctx.mask_blocks, ctx.exchange)
        return *grads, None, None, None


@torch.library.custom_op(
    "meshwright::ring_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool causal, int group)"
    " -> (Tensor, Tensor)",
)
def ring_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `ring_attention` as an operator that torch.compile traces (comm/graph_collectives.py). Returns the
    output and the log-sum-exp. `group` is the key of the ring's group."""
    return _ring_forward(query, key, value, scale, *_ring_of(query, mask, causal, group))


def _ring_of(query: torch.Tensor, mask: torch.Tensor | None, causal: bool, key: int) -> tuple[MaskBlocks, KVExchange]:
    group = CommGroup.by_key[key]
    pieces = HeadTailSplit(group.size, group.index)
    return MaskBlocks(pieces, causal, mask, query.shape[-2] * group.size), make_kv_exchange(group)


@ring_in_graph.register_fake
def _ring_result(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return kernels.LseMerge(query, value.shape[-1]).result()


@torch.library.custom_op(
    "meshwright::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor[] saved, Tensor? mask, float scale, bool causal, int group)"
    " -> (Tensor, Tensor, Tensor)",
)
def _ring_backward_in_graph(
    gradient: torch.Tensor,
    saved: list[torch.Tensor],
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    group: int,
) -> tuple[torch.Tensor, ...]:
    grads = _ring_backward(gradient, tuple(saved), scale, *_ring_of(saved[0], mask, causal, group))
    return tuple(each.contiguous() for each in grads)


@_ring_backward_in_graph.register_fake
def _ring_gradients(gradient: torch.Tensor, saved: list[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in saved[:3])


def _save_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, mask, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, mask)


def _ring_derivative(ctx: Any, gradient: torch.Tensor, of_total: Any) -> tuple[torch.Tensor | None, ...]:
    *saved, mask = ctx.saved_tensors
    return *_ring_backward_in_graph(gradient, saved, mask, *ctx.rest), None, None, None, None


ring_in_graph.register_autograd(_ring_derivative, setup_context=_save_ring)


def _concat_kv(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns keys and values concatenated into one message (B, G, T, D + Dv)."""
    return torch.cat([key, value], -1)


def _partial_attentions(
    query: torch.Tensor, piece: tuple[torch.Tensor, ...], scale: float, mask_blocks: MaskBlocks, source: int
) -> Iterator[tuple[MaskBlock, kernels.PartialAttention]]:
    block = mask_blocks.of(source, query.dtype)
    if block is not None:
        key, value = (tensor[..., block.columns, :] for tensor in piece)
        yield block, kernels.PartialAttention(query[..., block.rows, :], key, value, scale, block.causal, block.bias)
