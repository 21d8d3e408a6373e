"""How many of a sequence's tokens an expert takes at most. What comes after is dropped: the token keeps its other experts and its residual.

Of a sequence of T tokens with k experts each, every one of E experts takes ceil(factor x T k / E) pairs at most, in order of position. So the result
depends on the sequence alone, and is the same under every plan; it is another one than without a limit, so the factor belongs to the model
or the workload. Ranks that hold parts of a sequence gather the numbers of the chosen experts (no gradient) and each cuts out its own.
Sources: Lepikhin et al., GShard, arXiv 2006.16668, section 2.2 (a group here is a sequence); Fedus et al., Switch Transformer, arXiv 2101.03961, 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.anatomy import Experts
from meshwright.base.errors import InputError
from meshwright.parallel.context.pieces import Pieces
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor import collectives

FACTOR = "expert_capacity"
"""The attribute of a model that says so."""


class Capacity:
    """`rows`: sequences of the micro-batch that runs."""

    def __init__(self, factor: float, mesh: Mesh) -> None:
        self.factor, self.rows = factor, 1
        self.parts = mesh.tp if mesh.plan.sequence_parallel else None
        self.pieces = mesh.group("cp")

    def kept(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Which of the pairs `index` (N, k) of this rank's tokens stay."""
        whole = index.view(self.rows, -1, index.shape[-1])
        if self.parts is not None:
            whole = collectives.join(whole, self.parts, 1)
        cut = Pieces(self.pieces.size, self.pieces.index) if self.pieces is not None else None
        if cut is not None and self.pieces is not None:
            whole = cut.in_order(collectives.join(whole, self.pieces, 1), 1)
        kept = within(whole, experts, self.factor)
        kept = kept if cut is None else cut.cut(kept, 1)
        kept = kept if self.parts is None else collectives.own_slice(kept, self.parts, 1)
        return kept.reshape(index.shape)


def within(index: torch.Tensor, experts: int, factor: float) -> torch.Tensor:
    """Of whole sequences, `index` (B, T, k): the pairs that come before an expert has its share.

    >>> within(torch.tensor([[[0], [0], [1], [0]]]), 2, 1.0).flatten().tolist()
    [True, True, True, False]
    >>> within(torch.tensor([[[2], [2], [0], [0]]]), 2, 0.5).flatten().tolist()  # 2 is none of them, and has no share
    [True, True, True, False]
    """
    rows, length, chosen = index.shape
    flat = index.reshape(rows, -1).clamp(max=experts)
    place = F.one_hot(flat, experts + 1).cumsum(1).gather(2, flat.unsqueeze(2)).squeeze(2)
    return ((place <= math.ceil(factor * length * chosen / experts)) | (flat == experts)).view(index.shape)


def capacity_of(model: nn.Module, mixtures: int, mesh: Mesh) -> Capacity | None:
    """What the model's attribute asks for; None without."""
    factor: Any = getattr(model, FACTOR, None)
    if factor is None:
        return None
    if not mixtures:
        raise InputError(f"{FACTOR} {factor:g} limits experts that are given pairs of token and expert; none were found: leave it out")
    if not factor > 0:
        raise InputError(f"{FACTOR} {factor:g} is the share of the mean that an expert takes at most: more than 0")
    return Capacity(float(factor), mesh)


def drop_beyond(model: nn.Module, mixtures: Sequence[Experts], length: int) -> None:
    """The same on one device, for comparisons, where the modules of experts are given rows of `length` tokens."""
    factor = float(getattr(model, FACTOR))

    def drop(count: int, module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> Any:
        index = next(tensor for tensor in (*args, *kwargs.values()) if not tensor.is_floating_point())
        kept = within(index.view(-1, length, index.shape[-1]), count, factor).view(index.shape)
        limited = lambda tensor: tensor * kept if tensor.shape == index.shape and tensor.is_floating_point() else tensor
        return tuple(map(limited, args)), {name: limited(tensor) for name, tensor in kwargs.items()}

    for experts in mixtures:
        model.get_submodule(experts.path).register_forward_pre_hook(partial(drop, experts.count), with_kwargs=True)
