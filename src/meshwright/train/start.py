"""A start from weights that no rank ever holds whole: the model is built without memory, cut by the plan, and each rank reads its own part.

    with without_memory():                              # parameters get shapes only; buffers are made as ever
        model = AutoModelForCausalLM.from_config(config)
    trainer = parallelize(model, optimizer, plan)
    trainer.load_weights(folder)                        # safetensors; every rank reads the rows and columns that it holds

Promise: what is trained is what `from_pretrained` on one device would have trained. A parameter that was never filled is NaN, not zero,
and a step before `load_weights` is refused. Buffers that a file has (running means, corrections of a router) are read from it, all others
(rotary frequencies, masks) are what the model's own code made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from meshwright.base.errors import InputError
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.weights import BUFFER, PREFIX, Weights, load_weights
from meshwright.parallel import state
from meshwright.train.conversion import sources_of

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel
    from meshwright.train.trainer import Trainer

ADAPTED = ".base_layer."
"""What adapters put into the name of a layer that they wrap; files of weights know nothing of it."""
OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"position_ids$", r"\.attn\.(masked_)?bias$", r"num_batches_tracked$")
"""Tensors that files of earlier versions hold and that models make themselves."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, modules are built with parameters on the meta device: shapes and types without memory. Buffers are real."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def fill(trainer: Trainer, path: Path | str) -> None:
    """Every parameter of `trainer` that was built without memory, from the weights at `path`. Every rank calls it. InputError says what does not fit."""
    engine = trainer.engine
    weights = None if (Path(path) / MANIFEST).exists() else _checked(path, engine)
    engine.zero.settle()
    pieces = map(state.of_first, state.weight_pieces(engine, saving=False))  # replicas that go their own ways all begin with the same
    held = (item for item in pieces if item.piece.name.removeprefix(PREFIX) in engine.unfilled)
    named = ((item.piece._replace(name=item.piece.name.replace(ADAPTED, ".")), item.data) for item in held)
    with torch.no_grad():
        load_weights(path, named, weights)
        for unit in engine.zero.units:
            unit.write_back()
            unit.share().wait()
        if engine.outer is not None:
            engine.outer.begin_again()
    if weights is not None:
        _fill_buffers(engine, weights)
    engine.unfilled = frozenset()


def _checked(path: Path | str, engine: Parallel) -> Weights:
    """The weights at `path`, seen to be those of the whole model, whatever this rank holds of it: all ranks find the same."""
    weights = Weights(path)
    shapes = {name.replace(ADAPTED, "."): engine.shapes[name] for name in engine.unfilled}
    others = {name.replace(ADAPTED, ".") for name in (*engine.beside.second, *engine.beside.buffers)}
    weights.sources = sources_of(weights, engine.model, shapes.keys() | others)
    weights.check(shapes, others, [*OLD_BUFFERS, *(getattr(engine.model, "_keys_to_ignore_on_load_unexpected", None) or ())])
    return weights


@torch.no_grad()
def _fill_buffers(engine: Parallel, weights: Weights) -> None:
    """Buffers that belong to the saved state, of the modules that this rank holds, as much of them as it holds."""
    for piece, data in state.buffer_pieces(engine, saving=False):
        name = piece.name.removeprefix(BUFFER)
        found = weights.whole(name.replace(ADAPTED, "."))
        if found is None:
            continue
        if tuple(found.shape) != piece.shape:
            raise InputError(f"{weights.path}: {name} has shape {list(found.shape)}, this model's is {list(piece.shape)}")
        if piece.split is not None:
            found = torch.cat([found.narrow(piece.split, first, end - first) for first, end in piece.intervals], piece.split)
        data.copy_(found.reshape(-1))
