"""A few runs through an optimizer at a time, as if each such step were the only one of its update.

Units whose gradients or weights are in the type of the update for a moment only, and states that are made in a first update or wait elsewhere,
pass by so: what an update needs besides is then a window's, however large a unit is. Numbers of a group, such as a count of steps that an
optimizer does not keep for each of its parameters, are for every step of an update what they were before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from meshwright.parallel.zero.master import Run


class Few:
    """Leaves in the groups of an optimizer some parameters alone: else each of its steps would look at all runs of the model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.all = [group["params"] for group in self.groups]
        self.numbers = [{name: value for name, value in group.items() if isinstance(value, int | float)} for group in self.groups]

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {id(run): at for at, runs in enumerate(self.all) for run in runs}

    def __call__(self, runs: Sequence[torch.nn.Parameter]) -> None:
        chosen: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for run in runs:
            chosen[self._group_of[id(run)]].append(run)
        for group, some, numbers in zip(self.groups, chosen, self.numbers, strict=True):
            group.update(numbers, params=some)

    def step(self, runs: Sequence[Run]) -> None:
        """Update `runs`, those that were skipped until now by themselves: fused kernels of torch want states of all that they are given, or of none."""
        fresh, others = [run for run in runs if run.fresh], [run for run in runs if not (run.fresh or run.skipped)]
        gradients = [run.grad for run in others]
        if fresh:
            for run in others:  # an optimizer may hold parameters outside of its groups too
                run.grad = None
            self(fresh)
            self.optimizer.step()
            for run in fresh:
                run.grad = None
        if others:
            for run, gradient in zip(others, gradients, strict=True):
                run.grad = gradient
            self(others)
            self.optimizer.step()


@contextmanager
def few_of(optimizer: torch.optim.Optimizer) -> Iterator[Few]:
    """Until the first call the optimizer has all of its parameters, and so it has when this ends."""
    few = Few(optimizer)
    try:
        yield few
    finally:
        for group, runs in zip(few.groups, few.all, strict=True):
            group["params"] = runs
