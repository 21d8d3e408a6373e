"""A few runs through an optimizer at a time, as if each such step were the only one of its update.

Units whose gradients or weights are in the type of the update for a moment only, and states that are made in a first update or wait elsewhere,
pass by so: what an update needs besides is then a window's, however large a unit is. Numbers of a group or of the optimizer itself, such as a count of
steps that it does not keep for each of its parameters, are for every step of an update what they were before it, and afterwards what the last step
with parameters of the group has made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from meshwright.parallel.zero.master import Run, nested


class Few:
    """Leaves in the groups of an optimizer some parameters alone: else each of its steps would look at all runs of the model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.all = [group["params"] for group in self.groups]
        self._holders: list[dict[str, Any]] = [*self.groups, *map(vars, nested(optimizer))]
        self._before = list(map(numbers_in, self._holders))
        self._after = list(self._before)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {id(run): at for at, runs in enumerate(self.all) for run in runs}

    def __call__(self, runs: Sequence[torch.nn.Parameter]) -> None:
        self.record()
        chosen: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for run in runs:
            chosen[self._group_of[id(run)]].append(run)
        for group, some in zip(self.groups, chosen, strict=True):
            group["params"] = some
        self._put(self._before)

    def record(self) -> None:
        """Remember the numbers that the last step left: those of groups that it had parameters of, or that have none on this rank."""
        for at, holder in enumerate(self._holders):
            if at >= len(self.groups) or holder["params"] or not self.all[at]:
                self._after[at] = numbers_in(holder)

    def end(self) -> None:
        """Give the groups all of their parameters, and the numbers of after the update."""
        self.record()
        self._put(self._after)
        for group, runs in zip(self.groups, self.all, strict=True):
            group["params"] = runs

    def _put(self, numbers: Sequence[Mapping[str, float]]) -> None:
        for holder, values in zip(self._holders, numbers, strict=True):
            for name in numbers_in(holder).keys() - values.keys():
                del holder[name]
            holder.update(values)

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
        few.end()


def numbers_in(held: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of a group, or of an optimizer's own attributes.

    >>> numbers_in({"params": [], "lr": 0.1, "k": 3, "betas": (0.9, 0.99)})
    {'lr': 0.1, 'k': 3}
    """
    return {name: value for name, value in held.items() if isinstance(value, int | float)}
