"""Plays ranks that each hold a slice of the sequence on what a model does around its blocks.

Sequence parallelism cuts the hidden state at the first block and joins it behind the last (Korthikanti et al., 2022, section 4.2.2): what
the model's own forward does between its blocks runs on slices. Here no block runs. Each is given what the model gives it and returns
random numbers, the whole or a slice of them, and what blocks are given, what reaches the head, and the gradients must be slices of the
whole. Those of parameters must be the whole on every rank, or add up to it: such parameters work on slices, between the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.anatomy.conditions import fresh, leaf_of
from meshwright.anatomy.cut_records import (
    SMALL,
    Reached,
    Record,
    Snapshot,
    backward,
    compare_cuts,
    compare_parameters,
    hidden_in,
    sequence_part,
    whole,
)
from meshwright.anatomy.projected import Projected
from meshwright.anatomy.prove import Caught, Proof, with_first
from meshwright.anatomy.seeding import set_seed

RANKS = 2


def objection_between(proof: Proof, blocks: Sequence[str], head: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Why what stands around `blocks`, the one stack in its order, cannot run on slices, None when it can; and the parameters
    outside of the blocks whose gradient is then a part on each rank."""
    summed: dict[str, bool] = {}
    for call, reached in zip(proof.called, proof.reached, strict=True):
        first = next((one for path, one in reached.items() if path in blocks), None)
        if first is None or first.output is None:
            return "its blocks were not seen to run", ()
        before = Snapshot(proof.model)
        try:
            known = _run(proof, call, blocks, head, first, 0, 1, None)
            before.put_back()
            ranks = []
            for rank in range(RANKS):
                ranks.append(_run(proof, call, blocks, head, first, rank, RANKS, known))
                before.put_back()
        except Exception as error:
            before.put_back()
            return (
                f"what the model does around its blocks does not run on a slice ({(str(error).splitlines() or [type(error).__name__])[0][:100]})",
                (),
            )
        part = "on a slice of the sequence"
        if (why := compare_cuts(known, ranks, part) or compare_parameters(known, ranks, part, summed)) is not None:
            return why, ()
    return None, tuple(name for name, is_part in summed.items() if is_part)


def _run(
    proof: Proof, call: Any, blocks: Sequence[str], head: str | None, form: Reached, rank: int, ranks: int, known: Record | None
) -> Record:
    """The model with no block running: on the whole for one rank, else on slices of what `known` has."""
    record, model = Record(), proof.model
    part = sequence_part(rank, ranks) if ranks > 1 else whole
    undo: list[tuple[nn.Module, Any]] = []

    def block(path: str, place: int) -> Callable[..., Any]:
        def returned(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_in(args, kwargs)
            record.brought[f"the input of {path}", 0] = (hidden.clone(), part if place else whole)
            others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value is not hidden]
            for number, value in enumerate(others):
                record.brought[f"argument {number} of {path}", 0] = (value, whole)
            there = hidden if known is None else known.brought[f"the input of {path}", 0][0]
            made = torch.randn(there.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64).to(there)
            own = whole if place == len(blocks) - 1 else part
            leaf = leaf_of(own(made))
            record.leaves[f"the output of {path}", 0] = (leaf, own)
            return with_first(fresh(form.output), leaf.clone())

        return returned

    def at_head(module: nn.Module, args: Any, kwargs: Any) -> None:
        record.brought["the input of the head", 0] = (hidden_in(args, kwargs).clone(), whole)
        raise Caught

    inside = tuple(f"{path}." for path in blocks)
    parameters = {name: one for name, one in model.named_parameters() if not name.startswith(inside) and not one.is_meta}
    projected = Projected({name: one for name, one in parameters.items() if one.numel() > SMALL and one.ndim == 2}, {})
    set_seed(0)
    with ExitStack() as stack:
        stack.enter_context(proof.running())
        stack.enter_context(projected)
        if head is not None:
            stack.callback(model.get_submodule(head).register_forward_pre_hook(at_head, with_kwargs=True).remove)
        for place, path in enumerate(blocks):
            module = model.get_submodule(path)
            undo.append((module, vars(module).get("forward")))
            module.forward = block(path, place)  # type: ignore[method-assign]
        try:
            args, kwargs = fresh(call)
            output = model(*args, **kwargs)
            for number, value in enumerate(one for one in tree_leaves(output) if isinstance(one, torch.Tensor)):
                record.brought[f"output {number} of the model", 0] = (value, whole)
        except Caught:
            pass
        finally:
            for module, own in undo:
                if own is None:
                    del module.forward
                else:
                    module.forward = own
        backward(record, known or record, parameters, projected)
    return record
