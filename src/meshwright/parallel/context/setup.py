"""A model made ready for context ranks: its attention is torch's, it is proven to work on pieces, and its calls go to the plan's exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.anatomy import Anatomy
from meshwright.anatomy.inputs import Example
from meshwright.base.errors import InputError
from meshwright.parallel.context import ring, ulysses
from meshwright.parallel.context.blocks import Context
from meshwright.parallel.context.call import Call, attend_plainly
from meshwright.parallel.context.pieces import Pieces
from meshwright.parallel.context.proof import Objection, prove
from meshwright.parallel.context.travel import travel_of
from meshwright.parallel.exchange.among import among
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.pipeline.gates import Gate
from meshwright.spec import plan as plans


def context_of(model: nn.Module, anatomy: Anatomy, mesh: Mesh, example: Example | None = None) -> Context | None:
    """How this rank works on its piece; None without context parallelism. Raises InputError for a model that cannot."""
    plan, group = mesh.plan, mesh.group("cp")
    if group is None:
        return None
    try:
        if anatomy.blocks is None or not anatomy.vocabulary:
            raise Objection("it has no blocks behind a vocabulary embedding, so no sequence to cut")
        by_torch(model)
        way = prove(model, anatomy, example)
    except Objection as error:
        raise InputError(f"plan {plan.name}: cp({plan.cp}) cannot cut {type(model).__name__}: {error}; use cp1") from None
    attend = attending(mesh)
    if plan.recompute == plans.Recompute.attn:
        attend = partial(checkpoint, attend, use_reentrant=False)
    if plan.compile:
        attend = torch.compiler.disable(attend)
    return Context(Pieces(group.size, group.index), attend, way, plan.tp if plan.sequence_parallel else 1)


def attending(mesh: Mesh) -> Callable[[Call], torch.Tensor]:
    """How this rank attends: neighbours exchange heads (all context ranks, some of them, or none), the others go round in rings."""
    grid, cp, heads = mesh.grid, mesh.plan.cp, mesh.plan.head_ranks
    turn, place = divmod(mesh.place.cp, heads)
    column = lambda rank: grid.place(rank)._replace(cp=0)
    attend: Callable[[Call], torch.Tensor] = attend_plainly
    rings = mesh.group("cp") if heads == 1 else among(mesh, "rings", lambda rank: (column(rank), grid.place(rank).cp % heads))
    if rings is not None:
        attend = partial(ring.attend, pieces=Pieces(cp // heads, turn), travel=travel_of(rings))
    if heads == 1:
        return attend
    together = mesh.group("cp") if heads == cp else among(mesh, "heads", lambda rank: (column(rank), grid.place(rank).cp // heads))
    assert together is not None
    return partial(ulysses.attend, pieces=Pieces(heads, place), way=ulysses.Way(together, cp, attend))


def by_torch(model: nn.Module) -> None:
    """Attention that a Hugging Face model writes out itself becomes a call of torch's, where its configuration has the choice."""
    config: Any = getattr(model, "config", None)
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(config, "_attn_implementation", "sdpa") == "sdpa":
        return
    try:
        choose("sdpa")
    except (ValueError, ImportError):
        raise Objection(
            "it writes its attention out itself, and transformers has no other form of it (soft caps on scores have none)"
        ) from None


def set_context(model: nn.Module, anatomy: Anatomy, gates: list[Gate], context: Context | None) -> None:
    """Blocks work on this rank's piece of the sequence; the first one's hidden state is cut before anything else is done to it."""
    for gate in gates if context is not None else ():
        assert context is not None
        if gate.index is not None:
            gate.inner = context.around(gate.inner, gate.index)
        if gate.index == 0:
            gate.before = _chain(context.cut_hidden, gate.before)
        if gate.index == anatomy.count - 1:
            gate.after = _chain(gate.after, context.place_hidden)
    if context is not None and context.placed and not isinstance(head := model.get_submodule(anatomy.head or ""), Absent):
        context.cut_before(head)


def _chain(*functions: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """One after the other; None does nothing."""

    def all_of_them(hidden: torch.Tensor) -> torch.Tensor:
        for function in functions:
            hidden = hidden if function is None else function(hidden)
        return hidden

    return all_of_them
