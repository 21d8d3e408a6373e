"""Prepares a model for context parallelism. Selects torch's attention, verifies that the model can run on pieces of a
sequence, and chooses how the plan exchanges keys, values or heads in attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.context_parallel import ring, ulysses
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.context_parallel.kernels import SdpaCall, torch_sdpa
from meshwright.runtime.context_parallel.load_balance import HeadTailSplit
from meshwright.runtime.context_parallel.ring import make_kv_exchange
from meshwright.runtime.context_parallel.verify import CannotCutSequence, verify_sequence_cut
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.enums import Recompute


def make_context_state(
    model: nn.Module,
    anatomy: ModelGraph,
    mesh: ParallelContext,
    factory: GroupFactory,
    example: ExampleInputs | None = None,
) -> ContextState | None:
    """Returns the context state of this rank, None without context parallelism.

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
        way = verify_sequence_cut(model, anatomy, example)
    except CannotCutSequence as error:
        raise InputError(
            Message(
                "plan {plan}: cp({cp}) cannot cut {type}: {error}; use cp1",
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
    return ContextState(HeadTailSplit(group.size, group.index), attend, way, plan.tp if plan.sequence_parallel else 1)


def choose_attention(mesh: ParallelContext, factory: GroupFactory) -> Callable[[SdpaCall], torch.Tensor]:
    """Returns the attention function of this rank. Groups of neighbouring context ranks (all, some, or one) exchange
    heads. Ranks with the same position in these groups form a ring."""
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
        attend = partial(ring.ring_attention, pieces=HeadTailSplit(cp // heads, turn), travel=make_kv_exchange(rings))
    if heads == 1:
        return attend
    together = (
        mesh.group("cp")
        if heads == cp
        else factory.by_key("heads", lambda rank: (column(rank), grid.place(rank).cp // heads))
    )
    assert together is not None
    return partial(
        ulysses.ulysses_attention, pieces=HeadTailSplit(heads, place), way=ulysses.UlyssesExchange(together, cp, attend)
    )


def use_torch_sdpa(model: nn.Module) -> None:
    """Switches a Hugging Face model with its own attention code to torch's attention, if its configuration has this
    option."""
    config: Any = getattr(model, "config", None)
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(config, "_attn_implementation", "sdpa") == "sdpa":
        return
    try:
        choose("sdpa")
    except (ValueError, ImportError):
        raise CannotCutSequence(
            Message(
                "it writes its attention out itself, and transformers has no other form of it (soft caps on scores "
                "have none)"
            )
        ) from None
