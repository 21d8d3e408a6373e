"""Dropout under tensor parallelism: the same draw where ranks hold the same, draws of their own where they hold shares.

Rule: tensor ranks have equal random states. On the way into a region each draws one number from it, the same on all, and goes on with a state made of
that number and its own place; on the way out the common state comes back. So shares are dropped independently of one another, what is
whole is dropped alike on every rank, and a layer that is recomputed draws again what it drew, for all follows from the common state.
Under sequence parallelism whole blocks work on slices, and a block takes the place of a region. Another tensor degree draws other numbers: the
loss is then one device's in distribution, and equal to it only with dropout at 0. Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.anatomy.seeding import set_seed
from meshwright.parallel.exchange.group import Group

SPREAD = 1_000_003
"""Apart: the seeds of two ranks from one number."""


def drops(model: nn.Module) -> bool:
    """Whether anything in `model` can be dropped: a module, or a rate that a forward method reads."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            return True
    config = getattr(model, "config", None)
    return any(value > 0 for name, value in vars(config).items() if "drop" in name and isinstance(value, float)) if config else False


def draw_apart(model: nn.Module, anatomy: Anatomy, group: Group, sequence_parallel: bool) -> None:
    """Hooks on every region (on every block, with sequence parallelism) of a model that drops anything."""
    if not drops(model):
        return
    if sequence_parallel:
        for index in range(anatomy.count):
            block = model.get_submodule(anatomy.block(index))
            Chance(group, 1).attach([block], [block])
        return
    for region in anatomy.regions:
        entered = (region.module,) if region.module else region.columns
        Chance(group, len(region.rows)).attach(
            [model.get_submodule(path) for path in entered], [model.get_submodule(path) for path in region.rows]
        )


class Chance:
    """A rank's own random state between the first entry and the last of `exits`."""

    def __init__(self, group: Group, exits: int) -> None:
        self.group, self.exits = group, exits
        self.left = 0
        self.first: nn.Module | None = None
        self.common: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def attach(self, entries: list[nn.Module], exits: list[nn.Module]) -> None:
        self.first = entries[0]
        for module in entries:
            module.register_forward_pre_hook(self.enter, prepend=True)
        for module in exits:  # always: the last block of a stage is left by an exception (pipeline/gates.py, StageDone)
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        if (self.common is not None and module is not self.first) or not module.training:
            return  # what the first one finds is of a recomputation that was broken off, behind which checkpoint mended the state
        number = int(torch.randint(1 << 40, (), device="cpu"))
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self.common, self.left = (torch.get_rng_state(), cuda), self.exits
        set_seed(number * SPREAD + self.group.index)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.common is None:
            return
        self.left -= 1
        if not self.left:
            cpu, cuda = self.common
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            self.common = None
