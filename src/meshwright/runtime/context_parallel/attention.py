"""Attention over all pieces of a sequence: ring attention, an exchange of heads (Ulysses), or both. The build pass
`create_groups` calls `make_context_state`.

`make_context_state` prepares a model for context parallelism. It switches the model to torch's attention, verifies that
the model can run on pieces of a sequence, and chooses the attention function of the plan.

Ring attention (ring.py) exchanges keys and values. `ulysses_attention` exchanges positions for heads. One all-to-all
gives each context rank some heads for the whole sequence. torch computes attention, and another all-to-all restores the
pieces of the sequence. Key-value heads are repeated until the number of ranks divides their number. All features of
torch's attention work, including dropout: each rank draws random numbers for its own heads.

[Note: both] Groups of u neighbours among the c context ranks may exchange heads. Each rank then has some heads for a
longer piece: the front chunks of the group's ranks in order, then their back chunks. For the rank with context index i,
the longer piece is the one that rank i div u has if the sequence is cut for c / u ranks. The c / u ranks with the same
heads then use ring attention (`UlyssesExchange.attending`), which does not support dropout.

Sources: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3; Fang and Zhao, Unified Sequence Parallelism,
arXiv 2405.07719.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.graph_collectives import collective
from meshwright.runtime.comm.group import CommGroup, linear_map
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.context_parallel.blocks import ContextState, HeadTailSplit
from meshwright.runtime.context_parallel.kernels import SdpaCall, torch_sdpa
from meshwright.runtime.context_parallel.ring import make_kv_exchange, ring_attention
from meshwright.runtime.context_parallel.verify import CannotCutSequence, verify_sequence_cut
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.enums import Recompute


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
    exchanged = lambda x, there, back: there(x) if torch.compiler.is_compiling() else linear_map(x, there, back)
    query, key, value = (exchanged(x, there, back) for x in (call.query, key, value))
    mask = call.mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
        mask = mask.narrow(-3, pieces.index * heads // ranks, heads // ranks)
    output = exchange.attending(SdpaCall(query, key, value, mask, call.dropout, call.causal, call.scale))
    return exchanged(output, back, there)


def sequence_to_heads(x: torch.Tensor, pieces: HeadTailSplit, exchange: UlyssesExchange) -> torch.Tensor:
    """Exchanges all heads of this rank's piece for some heads of all u pieces, in sequence order. Maps (B, H, T, D) to
    (B, H / u, u T, D). u is the number of ranks of `pieces`, and T the number of positions in one piece."""
    sent = x.unflatten(1, (pieces.ranks, -1)).movedim(1, 0).contiguous()
    received = _all_to_all(sent, exchange.group)
    return pieces.in_order(received.movedim(0, 2).flatten(2, 3), 2)


def _all_to_all(sent: torch.Tensor, group: CommGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return collective(sent, group.key, "all_to_all")
    received = torch.empty_like(sent)
    async_collectives.all_to_all(received.view(-1), sent.view(-1), group).wait()
    return received


def heads_to_sequence(x: torch.Tensor, pieces: HeadTailSplit, exchange: UlyssesExchange) -> torch.Tensor:
    """Inverts `sequence_to_heads`. The memory layout of the result is (B, T, H, D), so that the next matrix product
    reads the heads of a position without a copy."""
    sent = pieces.stacked(x, 2).unflatten(2, (pieces.ranks, -1)).movedim(2, 0).contiguous()
    received = _all_to_all(sent, exchange.group)
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
        attend = torch.compiler.disable(attend) if plan.compile else attend
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
    """Switches a Hugging Face model with its own attention code to torch's attention, and a reference model to dense
    masks of packed documents, because a rank has only a piece of the sequence. Does nothing if the model has no option
    for its attention code.

    Raises:
        CannotCutSequence: transformers has no torch attention for this model.
    """
    for module in model.modules():
        if isinstance(getattr(module, "needs_dense_mask", None), bool):
            module.needs_dense_mask = True  # type: ignore[assignment]
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
