"""Controls random numbers under tensor parallelism: for dropout, ranks draw equal numbers for replicated tensors and
independent numbers for shards. `shard_model` installs the hooks.

Rule: tensor ranks have equal random states, called the common state. On entry to a region (layers.py) each rank draws
one number from the common state. Inside the region each rank uses a random state that is derived from this number and
the index of the rank. On exit the common state is restored. So ranks draw independent dropout masks for shards, and
equal dropout masks for replicated tensors. A recomputed layer repeats its draws, because all of them follow from the
common state. Under sequence parallelism whole blocks compute on slices, so the rule applies to blocks instead of
regions. Draws depend on the tensor-parallel degree. So with dropout the loss equals that of one device only in
distribution. Without dropout the loss does not depend on random numbers. Source: Shoeybi et al., Megatron-LM (2019),
section 3.

This module also refuses models whose forward draws numbers from the generators of Python or NumPy, if several ranks or
passes would have to draw equal numbers. These generators have different states in different processes. So ranks that
together compute one sequence would draw different numbers. A block and its recompute would also draw different numbers.
Data-parallel ranks may draw different numbers, because they compute different sequences.

A model may have a `torch.Generator` of its own (analysis/own_generators.py). `check_own_generators` refuses plans under
which its numbers would differ from those of one device.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.run_conditions import set_seed
from meshwright.core.errors import PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.backend import Backend, initialized_accelerators
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.error_propagation import gather_objects
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan

RANK_SEED_STRIDE = 1_000_003
"""The seed of a rank is (number drawn from the common state) x RANK_SEED_STRIDE + rank index."""


def has_dropout(model: nn.Module) -> bool:
    """Returns whether `model` has dropout: a dropout module, or an attribute of a module or of its configuration that
    is a dropout rate above 0."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            return True
    config = getattr(model, "config", None)
    return (
        any(value > 0 for name, value in vars(config).items() if "drop" in name and isinstance(value, float))
        if config
        else False
    )


def install_tp_rng(model: nn.Module, anatomy: ModelGraph, group: CommGroup, sequence_parallel: bool) -> None:
    """If `model` has dropout, installs hooks that give ranks separate random states. The hooks are on every region, or
    under sequence parallelism on every block."""
    if not has_dropout(model):
        return
    if sequence_parallel:
        for index in range(anatomy.count):
            block = model.get_submodule(anatomy.block(index))
            TensorParallelRng(group, 1).attach([block], [block])
        return
    for region in anatomy.regions:
        entered = (region.module,) if region.module else region.columns
        TensorParallelRng(group, len(region.rows)).attach(
            [model.get_submodule(path) for path in entered], [model.get_submodule(path) for path in region.rows]
        )


class TensorParallelRng:
    """Gives each rank a separate random state from the entry of a region until `exits` exit modules have run."""

    def __init__(self, group: CommGroup, exits: int) -> None:
        self.group, self.exits = group, exits
        self.left = 0
        self.first: nn.Module | None = None
        self.common: tuple[torch.Tensor, list[tuple[Backend, torch.Tensor]]] | None = None

    def attach(self, entries: list[nn.Module], exits: list[nn.Module]) -> None:
        """Registers hooks on the modules at the entry and at the exits of a region."""
        self.first = entries[0]
        for module in entries:
            module.register_forward_pre_hook(self.enter, prepend=True)
        for module in exits:  # `StageExit` would skip a hook without always_call
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Saves the common random state and sets the separate state of this rank. Does nothing in evaluation mode, or
        if another entry of the region has already run in this forward."""
        if (self.common is not None and module is not self.first) or not module.training:
            # A saved state at the first entry means that a recompute was aborted. torch's checkpoint has then restored
            # the common random state.
            return
        number = int(torch.randint(1 << 40, (), device="cpu"))
        own = [(each, state) for each in initialized_accelerators() if (state := each.rng_state()) is not None]
        self.common, self.left = (torch.get_rng_state(), own), self.exits
        set_seed(number * RANK_SEED_STRIDE + self.group.index)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restores the common random state at the last exit."""
        if self.common is None:
            return
        self.left -= 1
        if not self.left:
            cpu, own = self.common
            torch.set_rng_state(cpu)
            for backend, state in own:
                backend.set_rng_state(state)
            self.common = None


@contextmanager
def forbid_python_rng(plan: Plan, checked: bool) -> Iterator[None]:
    """Checks that the forward inside the context draws no numbers from the generators of Python or NumPy. Such draws
    are permitted if under `plan` one rank computes each sequence in one pass. `checked`: whether an earlier forward has
    passed the check. If so, the context does nothing.

    Raises:
        PlanRefused: the forward draws numbers from these generators where this is not permitted.
    """
    together = plan.tp > 1 or plan.cp > 1 or plan.stages > 1
    if checked or not (together or plan.recompute != Recompute.none):
        yield
        return
    before = _python_rng_states()
    yield
    drawn = [name for name, state in _python_rng_states().items() if before.get(name, state) != state]
    if drawn:
        raise PlanRefused(
            Message(
                "plan {plan}: the model's forward draws random numbers from {drawn}, which differ between the ranks "
                "and passes that compute the same rows: draw them with torch, or use data ranks without recompute",
                plan=plan.name,
                drawn=drawn[0],
            )
        )


def check_own_generators(plan: Plan, drawn: Collection[torch.Generator], known: Collection[torch.Generator]) -> None:
    """Checks that each draw from the generators `drawn` gives the same numbers under `plan` as on one device. `known`:
    the generators that recompute restores. All ranks call it.

    Raises:
        PlanRefused: a draw gives other numbers. Every rank raises it.
    """
    unknown = set(drawn) - set(known)
    everyone = gather_objects((bool(drawn), bool(unknown)))
    if plan.stages > 1 and any(draws for draws, _ in everyone):
        raise PlanRefused(
            Message(
                "plan {plan}: the model's forward draws random numbers from a torch.Generator of its own, and one "
                "stage does not see the draws of the others: use pp1, or torch's default generator",
                plan=plan.name,
            )
        )
    if Recompute.full in (plan.recompute, plan.recompute_rest) and any(hidden for _, hidden in everyone):
        raise PlanRefused(
            Message(
                "plan {plan}: the model's forward draws random numbers from a torch.Generator that recompute cannot "
                "find: make it an attribute of a module before parallelize, or leave recompute out",
                plan=plan.name,
            )
        )


def seed_all_generators(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy."""
    set_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def preserve_python_rng() -> Iterator[None]:
    """Restores the states of the generators of Python and NumPy on exit."""
    numpy = sys.modules.get("numpy")
    own, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _python_rng_states() -> dict[str, Any]:
    """Returns the states of the generators of Python and (if it is imported) NumPy, by name."""
    found: dict[str, Any] = {"Python's random": hash(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found
