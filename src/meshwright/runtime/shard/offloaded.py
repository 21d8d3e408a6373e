"""The master of a flat unit whose states, and whose float32 weights where it has any, wait on the host or in files.

A run is of up to three parts: where both stay, where one of both waits, where both do (`spec/layout.py`). The
optimizer's runs and states are views of the
window's memory: on the host where they stay, of files a slot, which many windows share and which holds this window's
numbers only while it is
updated. What saves and loads (`parts`, `state_parts`) sees the file itself, mapped; the next update lets go of the map.
States of a part that is
`near` are on the device. Nothing is fetched or stored for these, unless their weights are in a file: then these alone
pass by.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.offload.param_swapper import NvmeShard
from meshwright.runtime.offload.swap_file import round_up_to_pages
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.shard.optimizer_shard import (
    CHUNK_ELEMENTS,
    NO_SCALARS,
    OptimizerShard,
    ParamRun,
    ScalarValues,
    ScalarValuesByParam,
    ShardParam,
    TensorExtent,
    is_elementwise,
    isolate_tensors,
    make_shard_params,
    replace_params,
    set_param_state,
)
from meshwright.spec.layout import OffloadSplit

MAIN_PARAM_KIND, GRADIENT_KIND, WEIGHT_KIND = "master", "gradient", "weights"


class FileExtent(NamedTuple):
    """Where a kind begins in the file."""

    begin: int
    dtype: torch.dtype


class OffloadedChunk:
    """Elements `start` to `stop` of a part. `copies`: the weights that it updates are not those that training reads."""

    def __init__(self, owner: OffloadedPart, start: int, stop: int) -> None:
        self.owner, self.start, self.stop, self.copies = owner, start, stop, owner.copies
        self.stays = owner.near and owner.file is None
        self.number, self.slot = owner.away.number(self.stays)
        self.runs: list[ShardParam] = []
        self.stretches: list[ParamRun] = []
        """What its runs are of, counted from its start."""
        self.updated = torch.empty(0)
        """What its runs are views of."""
        self.gradients: torch.Tensor | None = None
        """Its gradients where backward left them, once nothing is added to them any more."""
        self.is_down = False
        """Whether they wait on the host already (sums.py)."""
        self._down: torch.Tensor | None = None
        """Its gradients on the host, of a device that has memory of its own."""
        self.made = False
        """Whether the optimizer has made its states."""

    @property
    def of_unit(self) -> slice:
        """Its elements of the unit's own run."""
        return slice(self.owner.start + self.start, self.owner.start + self.stop)

    def view(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Its elements of `kind` where the optimizer finds them."""
        if kind in self.owner.held:
            return self.owner.held[kind][self.start : self.stop]
        numel = self.stop - self.start
        return self.slot.bytes(kind, round_up_to_pages(numel * dtype.itemsize)).view(dtype)[:numel]

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.split([run.numel() for run in self.runs])

    def fetch(self) -> None:
        """Its numbers out of the file, and the gradients of states that wait off an accelerator if they are known
        already."""
        scratch = self.owner.away.scratch
        for start, pages in self._pages():
            assert scratch is not None
            scratch.read(start, pages)
        if self.gradients is not None:
            self._bring_down(self.gradients)

    def _bring_down(self, gradients: torch.Tensor) -> None:
        if not self.owner.near and self.owner.away.beyond and not self.is_down:
            self._down = self.view(GRADIENT_KIND, gradients.dtype)
            self.owner.away.ferry.copy(self._down, gradients).wait()

    def store(self) -> None:
        """The updated weights to where training reads them, all else into the file."""
        owner, scratch = self.owner, self.owner.away.scratch
        if self.copies and isinstance(owner.shard, torch.Tensor):
            self._take_up(self.view(MAIN_PARAM_KIND, owner.dtype), owner.shard[self.start : self.stop])
        elif self.copies and owner.file is not None:
            kind = owner.file.dtype
            self.view(WEIGHT_KIND, kind).copy_(self.view(MAIN_PARAM_KIND, owner.dtype))
            size = round_up_to_pages((self.stop - self.start) * kind.itemsize)
            owner.file.scratch.write(
                owner.file.start + self.start * kind.itemsize, self.slot.bytes(WEIGHT_KIND, size)[:size]
            )
        for start, pages in self._pages():
            assert scratch is not None
            scratch.write(start, pages)

    def _take_up(self, updated: torch.Tensor, weights: torch.Tensor) -> None:
        """Of an accelerator's weights those that the host has updated go by pinned memory in their own type ([Note: one
        type, pinned])."""
        if self.owner.near or self.owner.on_host or not self.owner.away.beyond:
            weights.copy_(updated)
            return
        if updated.dtype != weights.dtype:
            updated = self.view(WEIGHT_KIND, weights.dtype).copy_(updated)
        self.owner.away.ferry.copy(weights, updated).wait()

    def _pages(self) -> list[tuple[int, torch.Tensor]]:
        """What of it is in the file: where it begins there, and the pages of the slot."""
        found = []
        for kind, place in list(self.owner.places.items()):
            if self.made or kind == MAIN_PARAM_KIND:
                size = round_up_to_pages((self.stop - self.start) * place.dtype.itemsize)
                found.append((place.begin + self.start * place.dtype.itemsize, self.slot.bytes(kind, size)[:size]))
        return found

    # --- the optimizer's view
    # -------------------------------------------------------------------------------------------------

    def give(self, scale: float) -> None:
        """Its gradients times `scale` to its runs."""
        assert self.gradients is not None
        if self._down is None:  # it was fetched before they were known
            self._bring_down(self.gradients)
        own, self._down = self.gradients if self._down is None else self._down, None
        own = (
            own.to(self.owner.device) if self.owner.near else own
        )  # sums that wait on the host come back to states that do not
        scaled = (
            own.to(self.owner.dtype, copy=True).mul_(scale) if self.copies else own.mul_(scale) if scale != 1.0 else own
        )
        for run, part in zip(self.runs, self.split(scaled), strict=True):
            run.grad = None if run.skipped else part

    def take_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """After the update; states that the optimizer made in its first one move to where they stay. Whether there were
        any."""
        for run in self.runs:
            run.grad = None
        of = next((run for run in self.runs if not run.bare), None)
        if of is None or (self.made and not any(run.fresh for run in self.runs)):
            return False
        for key, first in sorted(optimizer.state.get(of, {}).items()):
            if is_elementwise(first, of):
                self.owner.provide(key, first.dtype)
                for run, part in zip(self.runs, self.split(self.view(key, first.dtype)), strict=True):
                    if run.bare:
                        part.zero_()
                    elif run.fresh or not self.made:
                        optimizer.state[run][key] = part.copy_(optimizer.state[run][key])
        self.made = True
        return True

    def separate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """As `OptimizerShard.separate`; `tensors` by their elements of the unit's own run."""
        at = self.of_unit.start
        here = [TensorExtent(each.start - at, each.stop - at, each.name) for each in tensors]
        before, self.stretches = self.runs, isolate_tensors(self.stretches, here, names)
        self.runs = make_shard_params(self.updated, self.stretches)
        replace_params(optimizer, before, self.runs)

    def prepare(self, optimizer: torch.optim.Optimizer, scalars: ScalarValues, others: ScalarValuesByParam) -> None:
        """States that were laid and are filled from elsewhere."""
        parts = {
            kind: self.split(self.view(kind, dtype))
            for kind, dtype in self.owner.kinds.items()
            if kind != MAIN_PARAM_KIND
        }
        for at, run in enumerate(self.runs):
            set_param_state(optimizer, run, {kind: views[at] for kind, views in parts.items()}, scalars, others)
        self.made = bool(parts)


class OffloadedPart:
    """A part of a unit's run from `start` on. `near`: its states are on the device. `kinds`: what it has of states and
    masters, by name, and its type; it is
    `held`, or by `places` in the file."""

    def __init__(
        self,
        away: StateSwapper,
        lies: torch.Tensor | NvmeShard,
        dtype: torch.dtype,
        stretches: Sequence[ParamRun],
        part: OffloadSplit,
        near: bool,
    ) -> None:
        """`lies`: the weights that training reads. They are what is updated, if they have the type `dtype` and whoever
        updates reaches them; in a
        file they pass by as states do."""
        self.away, self.dtype, self.start, self.on_host, self.near = away, dtype, part.start, part.weights_wait, near
        self.file = None if isinstance(lies, torch.Tensor) else lies
        self.shard = lies
        values = lies if isinstance(lies, torch.Tensor) else lies.whole()
        self.numel, self.device = len(values), away.device
        self.copies = dtype != values.dtype or (not near and away.beyond and not self.on_host)
        self.kinds: dict[str, torch.dtype] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.places: dict[str, FileExtent] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        if self.copies:
            self.provide(MAIN_PARAM_KIND, dtype)
        elif self.file is not None:
            self.places[MAIN_PARAM_KIND] = FileExtent(self.file.start, dtype)
        at_once = (
            near and not backend_of(self.device).memory_is_host and self.file is None
        )  # an accelerator updates what stays there
        size = self.numel if at_once else CHUNK_ELEMENTS
        self.windows = [
            OffloadedChunk(self, first, min(first + size, self.numel)) for first in range(0, self.numel, size)
        ]
        for window in self.windows:
            last = window.of_unit.stop
            inside = [
                each.of(window.of_unit.start, last)
                for each in stretches
                if each.start < last and each.stop > window.of_unit.start
            ]
            updated = values[window.start : window.stop]
            if self.copies:
                window.slot.settle()
                updated = window.view(MAIN_PARAM_KIND, dtype).copy_(updated)
                away.store(window)
            elif self.file is not None:
                updated = window.view(MAIN_PARAM_KIND, dtype)
            window.updated, window.stretches = updated, inside
            window.runs = make_shard_params(updated, inside)

    @property
    def master(self) -> torch.Tensor:
        """What is updated, where it is."""
        if isinstance(self.shard, torch.Tensor) and not self.copies:
            return self.shard
        (whole,) = self.whole(MAIN_PARAM_KIND)
        return whole

    def provide(self, kind: str, dtype: torch.dtype) -> None:
        """Room for all elements of `kind`, zeros at first."""
        if kind in self.kinds:
            return
        self.kinds[kind] = dtype
        if self.near:
            self.held[kind] = torch.zeros(self.numel, dtype=dtype, device=self.device)
        elif self.away.in_files is not None:
            self.places[kind] = FileExtent(self.away.in_files.extend(self.numel * dtype.itemsize), dtype)
        else:
            self.held[kind] = torch.zeros(self.numel, dtype=dtype, pin_memory=self.away.pinned)

    def whole(self, kind: str) -> list[torch.Tensor]:
        """All of `kind`, where it is; what is written to it is there. Nothing where there is none."""
        self.away.settle()
        if kind in self.held:
            return [self.held[kind]]
        if kind in self.places and kind not in self._mapped:
            assert self.away.scratch is not None
            place = self.places[kind]
            self._mapped[kind] = self.away.scratch.mapped(place.begin, self.numel, place.dtype)
        return [self._mapped[kind]] if kind in self._mapped else []

    def let_go(self) -> None:
        """Of what was mapped: the file is written by others now."""
        self._mapped.clear()

    def bytes(self, *kinds: str) -> int:
        """Of these kinds."""
        return self.numel * sum(self.kinds[kind].itemsize for kind in kinds if kind in self.kinds)


class OffloadedShard(OptimizerShard):
    """Part by part."""

    def __init__(
        self,
        away: StateSwapper,
        lies: Sequence[torch.Tensor | NvmeShard],
        dtype: torch.dtype,
        stretches: Sequence[ParamRun],
        parts: Sequence[OffloadSplit],
    ) -> None:
        """`lies`: the weights of each of `parts`."""
        away.ferry.follow()  # weights were laid by what computes
        self.away = away
        self.each = [
            OffloadedPart(away, own, dtype, stretches, part, near=not part.states_wait)
            for own, part in zip(lies, parts, strict=True)
        ]
        self.windows = [window for part in self.each for window in part.windows]
        self.copies = any(part.copies for part in self.each)
        self.runs = [run for window in self.windows for run in window.runs]

    def separate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        for window in self.windows:
            window.separate(optimizer, tensors, names)
        self.runs = [run for window in self.windows for run in window.runs]
        self.single = [run for run in self.runs if run.single]

    @property
    def file(self) -> bool:
        """Whether weights are in files."""
        return any(part.file is not None for part in self.each)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part.master for part in self.each]

    @property
    def flat(self) -> torch.Tensor:
        (whole,) = self.parts
        return whole

    def let_go(self) -> None:
        for part in self.each:
            part.let_go()

    def bytes(self) -> int:
        return sum(part.bytes(MAIN_PARAM_KIND) for part in self.each if part.near)

    def state_bytes(self) -> int:
        near = [
            part for part in self.each if part.near and self.away.optimizer
        ]  # else the optimizer's own states are counted
        return sum(part.bytes(*(kind for kind in part.kinds if kind != MAIN_PARAM_KIND)) for part in near)

    def bytes_away(self) -> int:
        """On the host, or in the file, of states."""
        return sum(part.bytes(*part.kinds) for part in self.each if not part.near) if self.away.optimizer else 0

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Windows see to their own."""

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        kinds = sorted({kind for part in self.each for kind in part.kinds} - {MAIN_PARAM_KIND})
        return {kind: [whole for part in self.each for whole in part.whole(kind)] for kind in kinds}

    def prepare(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        self.away.settle()
        for part in self.each:
            for kind, name in kinds.items():
                part.provide(kind, getattr(torch, name))
        for window in self.windows:
            window.prepare(optimizer, scalars, others)
