"""The master of a flat unit whose states, and whose float32 weights where it has any, wait on the host or in files.

The optimizer's runs and states are views of the window's memory: on the host where they stay, of files a slot, which many windows share and
which holds this window's numbers only while it is updated. What saves and loads (`parts`, `state_parts`) sees the file itself, mapped; the next
update lets go of the map. Elements before `border` are `near`: their states are on the device, in windows of their own. Nothing is fetched or stored for
these, unless their weights are in a file: then these alone pass by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from meshwright.parallel.offload.away import Away
from meshwright.parallel.offload.scratch import paged
from meshwright.parallel.offload.shards import FileShard
from meshwright.parallel.zero.master import WINDOW, Master, Run, Stretch, is_elementwise, runs_of, scalars_of

MASTER, GRADIENT, WEIGHTS = "master", "gradient", "weights"


class Place(NamedTuple):
    """Where the elements from `first` on begin in the file."""

    begin: int
    first: int
    dtype: torch.dtype


class AwayWindow:
    """Elements `start` to `stop` of the own run of a unit. `copies`: the weights that it updates are not those that training reads."""

    def __init__(self, owner: AwayMaster, start: int, stop: int, copies: bool) -> None:
        self.owner, self.start, self.stop, self.copies = owner, start, stop, copies
        self.near = stop <= owner.border
        self.stays = self.near and owner.file is None
        self.number, self.slot = owner.away.number(self.stays)
        self.runs: list[Run] = []
        self.gradients: torch.Tensor | None = None
        """Its gradients where backward left them, once nothing is added to them any more."""
        self.is_down = False
        """Whether they wait on the host already (sums.py)."""
        self._down: torch.Tensor | None = None
        """Its gradients on the host, of a device that has memory of its own."""
        self.made = False
        """Whether the optimizer has made its states."""

    def view(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Its elements of `kind` where the optimizer finds them."""
        held, first = (self.owner.staying, 0) if self.near else (self.owner.held, self.owner.border)
        if kind in held:
            return held[kind][self.start - first : self.stop - first]
        numel = self.stop - self.start
        return self.slot.bytes(kind, paged(numel * dtype.itemsize)).view(dtype)[:numel]

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.split([run.numel() for run in self.runs])

    def fetch(self) -> None:
        """Its numbers out of the file, and the gradients of states that wait off an accelerator if they are known already."""
        scratch = self.owner.away.scratch
        for start, pages in self._pages():
            assert scratch is not None
            scratch.read(start, pages)
        if self.gradients is not None:
            self._bring_down(self.gradients)

    def _bring_down(self, gradients: torch.Tensor) -> None:
        if not self.near and self.owner.away.beyond and not self.is_down:
            self._down = self.view(GRADIENT, gradients.dtype)
            self.owner.away.ferry.copy(self._down, gradients).wait()

    def store(self) -> None:
        """The updated weights to where training reads them, all else into the file."""
        owner, scratch = self.owner, self.owner.away.scratch
        if self.copies and isinstance(owner.shard, torch.Tensor):
            self._take_up(self.view(MASTER, owner.dtype), owner.shard[self.start : self.stop])
        elif self.copies and owner.file is not None:
            kind = owner.file.dtype
            self.view(WEIGHTS, kind).copy_(self.view(MASTER, owner.dtype))
            size = paged((self.stop - self.start) * kind.itemsize)
            owner.file.scratch.write(owner.file.start + self.start * kind.itemsize, self.slot.bytes(WEIGHTS, size)[:size])
        for start, pages in self._pages():
            assert scratch is not None
            scratch.write(start, pages)

    def _take_up(self, updated: torch.Tensor, weights: torch.Tensor) -> None:
        """Of an accelerator's weights those that the host has updated go by pinned memory in their own type ([Note: one type, pinned])."""
        if self.near or self.owner.on_host or not self.owner.away.beyond:
            weights.copy_(updated)
            return
        if updated.dtype != weights.dtype:
            updated = self.view(WEIGHTS, weights.dtype).copy_(updated)
        self.owner.away.ferry.copy(weights, updated).wait()

    def _pages(self) -> list[tuple[int, torch.Tensor]]:
        """What of it is in the file: where it begins there, and the pages of the slot."""
        found = []
        for kind, place in list(self.owner.places.items()):
            if place.first <= self.start and (self.made or kind == MASTER):
                size = paged((self.stop - self.start) * place.dtype.itemsize)
                found.append((place.begin + (self.start - place.first) * place.dtype.itemsize, self.slot.bytes(kind, size)[:size]))
        return found

    # --- the optimizer's view -------------------------------------------------------------------------------------------------

    def give(self, scale: float) -> None:
        """Its gradients times `scale` to its runs."""
        assert self.gradients is not None
        if self._down is None:  # it was fetched before they were known
            self._bring_down(self.gradients)
        own, self._down = self.gradients if self._down is None else self._down, None
        own = own.to(self.owner.device) if self.near else own  # sums that wait on the host come back to states that do not
        scaled = own.to(self.owner.dtype, copy=True).mul_(scale) if self.copies else own.mul_(scale) if scale != 1.0 else own
        for run, part in zip(self.runs, self.split(scaled), strict=True):
            run.grad = part

    def take_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """After the update; states that the optimizer made in its first one move to where they stay. Whether there were any."""
        for run in self.runs:
            run.grad = None
        if self.made:
            return False
        for key, first in sorted(optimizer.state.get(self.runs[0], {}).items()):
            if is_elementwise(first, self.runs[0]):
                self.owner.provide(key, first.dtype)
                for run, part in zip(self.runs, self.split(self.view(key, first.dtype)), strict=True):
                    optimizer.state[run][key] = part.copy_(optimizer.state[run][key])
        self.made = True
        return True

    def prepare(self, optimizer: torch.optim.Optimizer, scalars: dict[str, float]) -> None:
        """States that were laid and are filled from elsewhere."""
        parts = {kind: self.split(self.view(kind, dtype)) for kind, dtype in self.owner.kinds.items() if kind != MASTER}
        for at, run in enumerate(self.runs):
            state: dict[str, Any] = {kind: views[at] for kind, views in parts.items()}
            state |= scalars_of(optimizer, run, scalars)
            if state:
                optimizer.state[run] = state
        self.made = bool(parts)


class AwayMaster(Master):
    """`kinds`: what is away, by name, and its type; from `border` on `held` on the host, or by `places` in the file; before it `staying`."""

    def __init__(
        self,
        away: Away,
        shard: torch.Tensor | FileShard,
        dtype: torch.dtype,
        stretches: Sequence[Stretch],
        waits: bool = False,
        on_host: bool = False,
    ) -> None:
        """`shard`: the weights that training reads. They are what is updated, if they have the type `dtype` and the host reaches them (`on_host`, of a
        device that has memory of its own); in a file they pass by as states do. `waits`: these are weights that the plan lets wait."""
        self.away, self.shard, self.dtype, self.on_host = away, shard, dtype, on_host
        away.ferry.follow()  # weights were laid by what computes
        self.file = None if isinstance(shard, torch.Tensor) else shard
        values = shard if isinstance(shard, torch.Tensor) else shard.whole()
        self.numel, self.device = len(values), away.device
        self.border = away.border(self.numel, waits)
        copied = dtype != values.dtype
        self.kinds: dict[str, torch.dtype] = {}
        self.staying: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.places: dict[str, Place] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        small = self.device.type == "cpu" or self.file is not None
        self.windows = [AwayWindow(self, start, stop, copied) for start, stop in _cuts(0, self.border, small)]
        self.windows += [
            AwayWindow(self, start, stop, copied or (away.beyond and not on_host)) for start, stop in _cuts(self.border, self.numel, True)
        ]
        self.copies = any(window.copies for window in self.windows)
        if self.copies:
            self.provide(MASTER, dtype)
        elif self.file is not None:
            self.places[MASTER] = Place(self.file.start, 0, dtype)
        for window in self.windows:
            inside = [each.of(window.start, window.stop) for each in stretches if each.start < window.stop and each.stop > window.start]
            updated = values[window.start : window.stop]
            if window.copies:
                window.slot.settle()
                updated = window.view(MASTER, dtype).copy_(updated)
                away.store(window)
            elif self.file is not None:
                updated = window.view(MASTER, dtype)
            window.runs = runs_of(updated, inside)
        self.runs = [run for window in self.windows for run in window.runs]

    @property
    def parts(self) -> list[torch.Tensor]:
        shard = self.shard
        if not self.copies:
            return [shard] if isinstance(shard, torch.Tensor) else self._rest(MASTER)
        near = [] if not self.border else [self.staying[MASTER] if self.windows[0].copies else shard[: self.border]]  # type: ignore[index]
        return near + self._rest(MASTER)

    @property
    def flat(self) -> torch.Tensor:
        (whole,) = self.parts
        return whole

    def provide(self, kind: str, dtype: torch.dtype) -> None:
        """Room for all elements of `kind`, zeros at first."""
        if kind in self.kinds:
            return
        self.kinds[kind] = dtype
        away, rest = self.away, self.numel - self.border
        if self.border and (kind != MASTER or self.windows[0].copies):
            self.staying[kind] = torch.zeros(self.border, dtype=dtype, device=self.device)
        if rest and away.in_files is not None:
            self.places[kind] = Place(away.in_files.extend(rest * dtype.itemsize), self.border, dtype)
        elif rest:
            self.held[kind] = torch.zeros(rest, dtype=dtype, pin_memory=away.pinned)

    def _rest(self, kind: str) -> list[torch.Tensor]:
        """All of `kind` that waits, where it is; what is written to it is there."""
        self.away.settle()
        if kind in self.held:
            return [self.held[kind]]
        if kind in self.places and kind not in self._mapped:
            assert self.away.scratch is not None
            place = self.places[kind]
            self._mapped[kind] = self.away.scratch.mapped(place.begin, self.numel - place.first, place.dtype)
        return [self._mapped[kind]] if kind in self._mapped else []

    def let_go(self) -> None:
        """Of what was mapped: the file is written by others now."""
        self._mapped.clear()

    def bytes(self) -> int:
        return self.border * self.dtype.itemsize if MASTER in self.staying else 0

    def state_bytes(self) -> int:
        staying = self.staying if self.away.optimizer else {}  # else the optimizer's own states are counted
        return sum(self.border * kept.dtype.itemsize for kind, kept in staying.items() if kind != MASTER)

    def bytes_away(self) -> int:
        """On the host, or in the file, of states."""
        return sum((self.numel - self.border) * dtype.itemsize for dtype in self.kinds.values()) if self.away.optimizer else 0

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Windows see to their own."""

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        near = {kind: [kept] for kind, kept in self.staying.items()}
        return {kind: near.get(kind, []) + self._rest(kind) for kind in sorted(self.kinds) if kind != MASTER}

    def prepare(self, optimizer: torch.optim.Optimizer, kinds: dict[str, str], scalars: dict[str, float]) -> None:
        self.away.settle()
        for kind, name in kinds.items():
            self.provide(kind, getattr(torch, name))
        for window in self.windows:
            window.prepare(optimizer, scalars)


def _cuts(start: int, stop: int, small: bool) -> list[tuple[int, int]]:
    """Windows of what lies between; an accelerator updates what stays there at once."""
    size = WINDOW if small else max(stop - start, 1)
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
