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

    start: int
    dtype: torch.dtype


class OffloadedChunk:
    """Elements `start` to `stop` of a part. `copies`: the weights that it updates are not those that training reads."""

    def __init__(self, owner: OffloadedPart, start: int, stop: int) -> None:
        self.part, self.start, self.stop, self.has_main_params = owner, start, stop, owner.has_main_params
        self.resident = owner.on_device and owner.nvme_shard is None
        self.index, self.buffer = owner.swapper.next_buffer(self.resident)
        self.params: list[ShardParam] = []
        self.runs: list[ParamRun] = []
        """What its runs are of, counted from its start."""
        self.updated = torch.empty(0)
        """What its runs are views of."""
        self.gradients: torch.Tensor | None = None
        """Its gradients where backward left them, once nothing is added to them any more."""
        self.grads_on_host = False
        """Whether they wait on the host already (sums.py)."""
        self._host_grads: torch.Tensor | None = None
        """Its gradients on the host, of a device that has memory of its own."""
        self.has_states = False
        """Whether the optimizer has made its states."""

    @property
    def unit_range(self) -> slice:
        """Its elements of the unit's own run."""
        return slice(self.part.start + self.start, self.part.start + self.stop)

    def view(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Its elements of `kind` where the optimizer finds them."""
        if kind in self.part.in_memory:
            return self.part.in_memory[kind][self.start : self.stop]
        numel = self.stop - self.start
        return self.buffer.pages(kind, round_up_to_pages(numel * dtype.itemsize)).view(dtype)[:numel]

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.split([run.numel() for run in self.params])

    def fetch(self) -> None:
        """Its numbers out of the file, and the gradients of states that wait off an accelerator if they are known
        already."""
        scratch = self.part.swapper.swap_file
        for start, pages in self._file_pages():
            assert scratch is not None
            scratch.read(start, pages)
        if self.gradients is not None:
            self._download_grads(self.gradients)

    def _download_grads(self, gradients: torch.Tensor) -> None:
        if not self.part.on_device and self.part.swapper.has_device_memory and not self.grads_on_host:
            self._host_grads = self.view(GRADIENT_KIND, gradients.dtype)
            self.part.swapper.copy_streams.copy(self._host_grads, gradients).wait()

    def store(self) -> None:
        """The updated weights to where training reads them, all else into the file."""
        owner, scratch = self.part, self.part.swapper.swap_file
        if self.has_main_params and isinstance(owner.storage, torch.Tensor):
            self._upload(self.view(MAIN_PARAM_KIND, owner.dtype), owner.storage[self.start : self.stop])
        elif self.has_main_params and owner.nvme_shard is not None:
            kind = owner.nvme_shard.dtype
            self.view(WEIGHT_KIND, kind).copy_(self.view(MAIN_PARAM_KIND, owner.dtype))
            size = round_up_to_pages((self.stop - self.start) * kind.itemsize)
            owner.nvme_shard.swap_file.write(
                owner.nvme_shard.start + self.start * kind.itemsize, self.buffer.pages(WEIGHT_KIND, size)[:size]
            )
        for start, pages in self._file_pages():
            assert scratch is not None
            scratch.write(start, pages)

    def _upload(self, updated: torch.Tensor, weights: torch.Tensor) -> None:
        """Of an accelerator's weights those that the host has updated go by pinned memory in their own type ([Note: one
        type, pinned])."""
        if self.part.on_device or self.part.on_host or not self.part.swapper.has_device_memory:
            weights.copy_(updated)
            return
        if updated.dtype != weights.dtype:
            updated = self.view(WEIGHT_KIND, weights.dtype).copy_(updated)
        self.part.swapper.copy_streams.copy(weights, updated).wait()

    def _file_pages(self) -> list[tuple[int, torch.Tensor]]:
        """What of it is in the file: where it begins there, and the pages of the slot."""
        found = []
        for kind, place in list(self.part.extents.items()):
            if self.has_states or kind == MAIN_PARAM_KIND:
                size = round_up_to_pages((self.stop - self.start) * place.dtype.itemsize)
                found.append((place.start + self.start * place.dtype.itemsize, self.buffer.pages(kind, size)[:size]))
        return found

    # --- the optimizer's view
    # -------------------------------------------------------------------------------------------------

    def set_grad(self, scale: float) -> None:
        """Its gradients times `scale` to its runs."""
        assert self.gradients is not None
        if self._host_grads is None:  # it was fetched before they were known
            self._download_grads(self.gradients)
        own, self._host_grads = self.gradients if self._host_grads is None else self._host_grads, None
        own = (
            own.to(self.part.device) if self.part.on_device else own
        )  # sums that wait on the host come back to states that do not
        scaled = (
            own.to(self.part.dtype, copy=True).mul_(scale)
            if self.has_main_params
            else own.mul_(scale)
            if scale != 1.0
            else own
        )
        for run, part in zip(self.params, self.split(scaled), strict=True):
            run.grad = None if run.skipped else part

    def clear_grad(self, optimizer: torch.optim.Optimizer) -> bool:
        """After the update; states that the optimizer made in its first one move to where they stay. Whether there were
        any."""
        for run in self.params:
            run.grad = None
        of = next((run for run in self.params if not run.has_no_state), None)
        if of is None or (self.has_states and not any(run.needs_new_state for run in self.params)):
            return False
        for key, first in sorted(optimizer.state.get(of, {}).items()):
            if is_elementwise(first, of):
                self.part.allocate(key, first.dtype)
                for run, part in zip(self.params, self.split(self.view(key, first.dtype)), strict=True):
                    if run.has_no_state:
                        part.zero_()
                    elif run.needs_new_state or not self.has_states:
                        optimizer.state[run][key] = part.copy_(optimizer.state[run][key])
        self.has_states = True
        return True

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """As `OptimizerShard.separate`; `tensors` by their elements of the unit's own run."""
        at = self.unit_range.start
        here = [TensorExtent(each.start - at, each.stop - at, each.name) for each in tensors]
        before, self.runs = self.params, isolate_tensors(self.runs, here, names)
        self.params = make_shard_params(self.updated, self.runs)
        replace_params(optimizer, before, self.params)

    def init_states(self, optimizer: torch.optim.Optimizer, scalars: ScalarValues, others: ScalarValuesByParam) -> None:
        """States that were laid and are filled from elsewhere."""
        parts = {
            kind: self.split(self.view(kind, dtype))
            for kind, dtype in self.part.dtypes.items()
            if kind != MAIN_PARAM_KIND
        }
        for at, run in enumerate(self.params):
            set_param_state(optimizer, run, {kind: views[at] for kind, views in parts.items()}, scalars, others)
        self.has_states = bool(parts)


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
        self.swapper, self.dtype, self.start, self.on_host, self.on_device = (
            away,
            dtype,
            part.start,
            part.weights_wait,
            near,
        )
        self.nvme_shard = None if isinstance(lies, torch.Tensor) else lies
        self.storage = lies
        values = lies if isinstance(lies, torch.Tensor) else lies.full()
        self.numel, self.device = len(values), away.device
        self.has_main_params = dtype != values.dtype or (not near and away.has_device_memory and not self.on_host)
        self.dtypes: dict[str, torch.dtype] = {}
        self.in_memory: dict[str, torch.Tensor] = {}
        self.extents: dict[str, FileExtent] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        if self.has_main_params:
            self.allocate(MAIN_PARAM_KIND, dtype)
        elif self.nvme_shard is not None:
            self.extents[MAIN_PARAM_KIND] = FileExtent(self.nvme_shard.start, dtype)
        at_once = (
            near and not backend_of(self.device).memory_is_host and self.nvme_shard is None
        )  # an accelerator updates what stays there
        size = self.numel if at_once else CHUNK_ELEMENTS
        self.chunks = [
            OffloadedChunk(self, first, min(first + size, self.numel)) for first in range(0, self.numel, size)
        ]
        for window in self.chunks:
            last = window.unit_range.stop
            inside = [
                each.clip(window.unit_range.start, last)
                for each in stretches
                if each.start < last and each.stop > window.unit_range.start
            ]
            updated = values[window.start : window.stop]
            if self.has_main_params:
                window.buffer.wait_stored()
                updated = window.view(MAIN_PARAM_KIND, dtype).copy_(updated)
                away.store(window)
            elif self.nvme_shard is not None:
                updated = window.view(MAIN_PARAM_KIND, dtype)
            window.updated, window.runs = updated, inside
            window.params = make_shard_params(updated, inside)

    @property
    def main_params(self) -> torch.Tensor:
        """What is updated, where it is."""
        if isinstance(self.storage, torch.Tensor) and not self.has_main_params:
            return self.storage
        (whole,) = self.full(MAIN_PARAM_KIND)
        return whole

    def allocate(self, kind: str, dtype: torch.dtype) -> None:
        """Room for all elements of `kind`, zeros at first."""
        if kind in self.dtypes:
            return
        self.dtypes[kind] = dtype
        if self.on_device:
            self.in_memory[kind] = torch.zeros(self.numel, dtype=dtype, device=self.device)
        elif self.swapper.state_file is not None:
            self.extents[kind] = FileExtent(self.swapper.state_file.extend(self.numel * dtype.itemsize), dtype)
        else:
            self.in_memory[kind] = torch.zeros(self.numel, dtype=dtype, pin_memory=self.swapper.pinned)

    def full(self, kind: str) -> list[torch.Tensor]:
        """All of `kind`, where it is; what is written to it is there. Nothing where there is none."""
        self.swapper.quiesce()
        if kind in self.in_memory:
            return [self.in_memory[kind]]
        if kind in self.extents and kind not in self._mapped:
            assert self.swapper.swap_file is not None
            place = self.extents[kind]
            self._mapped[kind] = self.swapper.swap_file.map(place.start, self.numel, place.dtype)
        return [self._mapped[kind]] if kind in self._mapped else []

    def unmap(self) -> None:
        """Of what was mapped: the file is written by others now."""
        self._mapped.clear()

    def bytes(self, *kinds: str) -> int:
        """Of these kinds."""
        return self.numel * sum(self.dtypes[kind].itemsize for kind in kinds if kind in self.dtypes)


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
        away.copy_streams.wait_for_compute()  # weights were laid by what computes
        self.swapper = away
        self.splits = [
            OffloadedPart(away, own, dtype, stretches, part, near=not part.states_wait)
            for own, part in zip(lies, parts, strict=True)
        ]
        self.chunks = [window for part in self.splits for window in part.chunks]
        self.has_main_params = any(part.has_main_params for part in self.splits)
        self.params = [run for window in self.chunks for run in window.params]

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        for window in self.chunks:
            window.isolate(optimizer, tensors, names)
        self.params = [run for window in self.chunks for run in window.params]
        self.isolated = [run for run in self.params if run.isolated]

    @property
    def in_file(self) -> bool:
        """Whether weights are in files."""
        return any(part.nvme_shard is not None for part in self.splits)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part.main_params for part in self.splits]

    @property
    def flat(self) -> torch.Tensor:
        (whole,) = self.parts
        return whole

    def unmap(self) -> None:
        for part in self.splits:
            part.unmap()

    def bytes(self) -> int:
        return sum(part.bytes(MAIN_PARAM_KIND) for part in self.splits if part.on_device)

    def state_bytes(self) -> int:
        near = [
            part for part in self.splits if part.on_device and self.swapper.optimizer
        ]  # else the optimizer's own states are counted
        return sum(part.bytes(*(kind for kind in part.dtypes if kind != MAIN_PARAM_KIND)) for part in near)

    def offloaded_bytes(self) -> int:
        """On the host, or in the file, of states."""
        return (
            sum(part.bytes(*part.dtypes) for part in self.splits if not part.on_device) if self.swapper.optimizer else 0
        )

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Windows see to their own."""

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        kinds = sorted({kind for part in self.splits for kind in part.dtypes} - {MAIN_PARAM_KIND})
        return {kind: [whole for part in self.splits for whole in part.full(kind)] for kind in kinds}

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        self.swapper.quiesce()
        for part in self.splits:
            for kind, name in kinds.items():
                part.allocate(kind, getattr(torch, name))
        for window in self.chunks:
            window.init_states(optimizer, scalars, others)
