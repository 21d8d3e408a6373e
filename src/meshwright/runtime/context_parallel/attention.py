"""Attention over all pieces of a sequence: ring attention, an exchange of heads (Ulysses), or both. The build pass
`create_groups` calls `make_context_state`.

`make_context_state` prepares a model for context parallelism. It switches the model to torch's attention, verifies that
the model can run on pieces of a sequence, and chooses the attention function of the plan.

Ring attention exchanges keys and values between context ranks and merges attention over all pieces exactly. Here a
piece is the keys and values of one rank. The pieces are exchanged in one of two ways:

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

`ulysses_attention` exchanges positions for heads. One all-to-all gives each context rank some heads for the whole
sequence. torch computes attention, and another all-to-all restores the pieces of the sequence. Key-value heads are
repeated until the number of ranks divides their number. All features of torch's attention work, including dropout: each
rank draws random numbers for its own heads.

[Note: both] Groups of u neighbours among the c context ranks may exchange heads. Each rank then has some heads for a
longer piece: the front chunks of the group's ranks in order, then their back chunks. For the rank with context index i,
the longer piece is the one that rank i div u has if the sequence is cut for c / u ranks. The c / u ranks with the same
heads then use ring attention (`UlyssesExchange.attending`), which does not support dropout.

Sources: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3; Fang and Zhao, Unified Sequence Parallelism,
arXiv 2405.07719.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup, linear_map
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.context_parallel import kernels
from meshwright.runtime.context_parallel.blocks import ContextState, HeadTailSplit
from meshwright.runtime.context_parallel.kernels import SdpaCall, torch_sdpa
from meshwright.runtime.context_parallel.verify import CannotCutSequence, verify_sequence_cut
from meshwright.runtime.error_propagation import interruptible_wait
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.enums import Recompute

KVVisitor = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a rank index and the piece of that rank. Returns the contribution of this rank's queries to the gradient of the
piece."""


class KVExchange(Protocol):
    """Exchanges keys and values between ranks. A `piece` (B, G, T / c, D + Dv) contains one rank's keys and values."""

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
    mask_blocks = MaskBlocks(pieces, call.causal, call.mask, length)
    output: torch.Tensor = _RingAttention.apply(call.query, call.key, call.value, call.scale, mask_blocks, exchange)
    return output


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
        widths = key.shape[-1], value.shape[-1]
        merged = kernels.LseMerge(query, value.shape[-1])
        for source, piece in exchange.visits(_concat_kv(key, value)):
            for block, part in _partial_attentions(query, piece.split(widths, -1), scale, mask_blocks, source):
                merged.add(block.rows, *kernels.attention_forward(part))
        output, total = merged.result()
        ctx.save_for_backward(query, key, value, output, total)
        ctx.scale, ctx.mask_blocks, ctx.exchange = scale, mask_blocks, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        widths = key.shape[-1], value.shape[-1]
        of_query = torch.zeros_like(query, dtype=total.dtype)

        def grad_of(source: int, piece: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(piece, dtype=total.dtype)
            for block, part in _partial_attentions(query, piece.split(widths, -1), ctx.scale, ctx.mask_blocks, source):
                rows = block.rows
                grads = kernels.attention_backward(part, gradient[..., rows, :], output[..., rows, :], total[..., rows])
                of_query[..., rows, :].add_(grads[0])
                found[..., block.columns, :].copy_(_concat_kv(*grads[1:]))
            return found

        of_key, of_value = ctx.exchange.collect(_concat_kv(key, value), grad_of).split(widths, -1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


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


class UlyssesExchange(NamedTuple):
    """How to exchange heads. `group`: the ranks that exchange heads. `cuts`: the number of all context ranks.
    `attending`: the attention function that runs between the two exchanges."""

    group: CommGroup
    cuts: int
    attending: Callable[[SdpaCall], torch.Tensor] = torch_sdpa


def ulysses_attention(call: SdpaCall, pieces: HeadTailSplit, exchange: UlyssesExchange) -> torch.Tensor:
    """Returns the attention of this rank's queries to the whole sequence: (B, H, T / c, Dv) for c context ranks.

    `pieces`: the split among the ranks that exchange heads.

    Raises:
        InputError: the number of ranks in `pieces` does not divide the number of heads. Or the call is not
            self-attention over one sequence, or has a mask that needs a gradient or does not cover the sequence.
    """
    ranks, heads = pieces.ranks, call.query.shape[1]
    call.check(call.query.shape[-2] * exchange.cuts)
    if heads % ranks:
        part = f"ulysses({ranks})" if exchange.cuts > ranks else f"cp({ranks})"
        raise InputError(
            Message(
                "ulysses: {part} does not divide the {heads} heads of a tensor rank: choose another degree, or use "
                "ring attention",
                part=part,
                heads=heads,
            )
        )
    times = ranks // math.gcd(ranks, call.key.shape[1])
    key, value = (x.repeat_interleave(times, 1) if times > 1 else x for x in (call.key, call.value))
    there, back = (
        partial(sequence_to_heads, pieces=pieces, exchange=exchange),
        partial(heads_to_sequence, pieces=pieces, exchange=exchange),
    )
    query, key, value = (linear_map(x, there, back) for x in (call.query, key, value))
    mask = call.mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
        mask = mask.narrow(-3, pieces.index * heads // ranks, heads // ranks)
    output = exchange.attending(SdpaCall(query, key, value, mask, call.dropout, call.causal, call.scale))
    return linear_map(output, back, there)


def sequence_to_heads(x: torch.Tensor, pieces: HeadTailSplit, exchange: UlyssesExchange) -> torch.Tensor:
    """Exchanges all heads of this rank's piece for some heads of all u pieces, in sequence order. Maps (B, H, T, D) to
    (B, H / u, u T, D). u is the number of ranks of `pieces`, and T the number of positions in one piece."""
    sent = x.unflatten(1, (pieces.ranks, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    async_collectives.all_to_all(received.view(-1), sent.view(-1), exchange.group).wait()
    return pieces.in_order(received.movedim(0, 2).flatten(2, 3), 2)


def heads_to_sequence(x: torch.Tensor, pieces: HeadTailSplit, exchange: UlyssesExchange) -> torch.Tensor:
    """Inverts `sequence_to_heads`. The memory layout of the result is (B, T, H, D), so that the next matrix product
    reads the heads of a position without a copy."""
    sent = pieces.stacked(x, 2).unflatten(2, (pieces.ranks, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    async_collectives.all_to_all(received.view(-1), sent.view(-1), exchange.group).wait()
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def make_context_state(
    model: nn.Module,
    anatomy: ModelGraph,
    mesh: ParallelContext,
    factory: GroupFactory,
    example: ExampleInputs | None = None,
) -> ContextState | None:
    """Returns the context state of this rank, or None without context parallelism. All ranks must call this function.

    `example`: inputs of the model in addition to token ids. The model is unchanged, except that a Hugging Face model
    with its own attention code is switched to torch's attention.

    Raises:
        InputError: the model cannot run on pieces of a sequence.
    """
    plan, group = mesh.plan, mesh.group("cp")
    if group is None:
        return None
    try:
        if anatomy.blocks is None or not anatomy.vocabulary:
            raise CannotCutSequence(Message("it has no blocks after a vocabulary embedding, so no sequence to split"))
        use_torch_sdpa(model)
        sequence_cut = verify_sequence_cut(model, anatomy, example)
    except CannotCutSequence as error:
        raise InputError(
            Message(
                "plan {plan}: cp({cp}) cannot split the sequence of {type}: {error}; use cp1",
                plan=plan.name,
                cp=plan.cp,
                type=type(model).__name__,
                error=error,
            )
        ) from None
    attend = choose_attention(mesh, factory)
    if plan.recompute == Recompute.attn:
        attend = partial(checkpoint, attend, use_reentrant=False)
    if plan.compile:
        attend = torch.compiler.disable(attend)
    return ContextState(
        HeadTailSplit(group.size, group.index), attend, sequence_cut, plan.tp if plan.sequence_parallel else 1
    )


def choose_attention(mesh: ParallelContext, factory: GroupFactory) -> Callable[[SdpaCall], torch.Tensor]:
    """Returns the attention function of this rank. All ranks must call `choose_attention`, because it creates groups.

    Groups of `ulysses_ranks` neighbouring context ranks exchange heads. Ranks with the same index in these groups form
    a ring.
    """
    grid, cp, heads = mesh.grid, mesh.plan.cp, mesh.plan.ulysses_ranks
    turn, place = divmod(mesh.coords.cp, heads)
    column = lambda rank: grid.place(rank)._replace(cp=0)
    attend: Callable[[SdpaCall], torch.Tensor] = torch_sdpa
    rings = (
        mesh.group("cp")
        if heads == 1
        else factory.by_key("rings", lambda rank: (column(rank), grid.place(rank).cp % heads))
    )
    if rings is not None:
        attend = partial(ring_attention, pieces=HeadTailSplit(cp // heads, turn), exchange=make_kv_exchange(rings))
    if heads == 1:
        return attend
    together = (
        mesh.group("cp")
        if heads == cp
        else factory.by_key("heads", lambda rank: (column(rank), grid.place(rank).cp // heads))
    )
    assert together is not None
    return partial(
        ulysses_attention, pieces=HeadTailSplit(heads, place), exchange=UlyssesExchange(together, cp, attend)
    )


def use_torch_sdpa(model: nn.Module) -> None:
    """Switches a Hugging Face model with its own attention code to torch's attention. Does nothing if the model has no
    option for its attention code.

    Raises:
        CannotCutSequence: transformers has no torch attention for this model.
    """
    config: Any = getattr(model, "config", None)
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(config, "_attn_implementation", "sdpa") == "sdpa":
        return
    try:
        choose("sdpa")
    except (ValueError, ImportError):
        raise CannotCutSequence(
            Message(
                "its attention does not call scaled_dot_product_attention, and transformers has no sdpa "
                "implementation for it (models with soft-capped scores have none)"
            )
        ) from None
