"""Implements the optimizer shard of a parameter group whose states, and possibly main weights, are offloaded to CPU or
NVMe. The updater passes the chunks of the shard to `StateSwapper` (offload/swapper.py).

A shard has up to three parts: a resident part, a part with offloaded states, and a part with offloaded states and
weights (`spec/layout.py`). Each part consists of chunks. The optimizer's parameters and states are views of the memory
of a chunk. With offload to CPU, this memory is the host memory that stores the states. With offload to NVMe, it is a
swap buffer, which several chunks use in turn. The buffer contains the values of a chunk only during the update of this
chunk. Saving and loading (`parts`, `state_parts`) map the file into memory, and the next update removes the mapping. A
part with `on_device` has its states on the device. Such a part needs no swapping, unless its weights are in a file. In
that case only its weights are swapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.offload.param_swapper import NvmeShard
from meshwright.runtime.offload.swap_file import round_up_to_pages
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.shard.optimizer_shard import (
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
from meshwright.spec.layout import CHUNK_ELEMENTS, OffloadSplit

MAIN_PARAM_KIND, GRADIENT_KIND, WEIGHT_KIND = "master", "gradient", "weights"


class FileExtent(NamedTuple):
    """The start (byte offset) and the dtype of one kind of value, such as momentum, in the swap file."""

    start: int
    dtype: torch.dtype


class OffloadedChunk:
    """Elements [start, stop) of a part of the shard. `has_main_params`: whether the update changes main weights, which
    are separate from the weights that the forward reads."""

    def __init__(self, part: OffloadedPart, start: int, stop: int) -> None:
        self.part, self.start, self.stop, self.has_main_params = part, start, stop, part.has_main_params
        self.resident = part.on_device and part.nvme_shard is None
        self.index, self.buffer = part.swapper.next_buffer(self.resident)
        self.params: list[ShardParam] = []
        self.runs: list[ParamRun] = []
        """The segments of the chunk's parameters. Their positions count from the start of the chunk."""
        self.updated = torch.empty(0)
        """The flat weights that the update changes. The chunk's parameters are views of this tensor."""
        self.gradients: torch.Tensor | None = None
        """The chunk's gradients in the gradient buffer. None until backward has completed them."""
        self.grads_on_host = False
        """Whether the gradients are offloaded to CPU."""
        self._host_grads: torch.Tensor | None = None
        """The copy of the gradients in host memory, if the device has its own memory."""
        self.has_states = False
        """Whether the optimizer has created the chunk's states."""

    @property
    def unit_range(self) -> slice:
        """Returns the elements of the chunk, as a slice of the parameter group's shard."""
        return slice(self.part.start + self.start, self.part.start + self.stop)

    def view(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the chunk's values of `kind` (a state, the main weights or the gradients), in the memory from which
        the optimizer reads them."""
        if kind in self.part.in_memory:
            return self.part.in_memory[kind][self.start : self.stop]
        numel = self.stop - self.start
        return self.buffer.pages(kind, round_up_to_pages(numel * dtype.itemsize)).view(dtype)[:numel]

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits `tensor`, which has as many elements as the chunk, into one view for each parameter."""
        return tensor.split([run.numel() for run in self.params])

    def fetch(self) -> None:
        """Reads the chunk from the file into the swap buffer. Copies the chunk's gradients to the host if they are
        complete."""
        swap_file = self.part.swapper.swap_file
        for start, pages in self._file_pages():
            assert swap_file is not None
            swap_file.read(start, pages)
        if self.gradients is not None:
            self._download_grads(self.gradients)

    def _download_grads(self, gradients: torch.Tensor) -> None:
        if not self.part.on_device and self.part.swapper.has_device_memory and not self.grads_on_host:
            self._host_grads = self.view(GRADIENT_KIND, gradients.dtype)
            self.part.swapper.copy_streams.copy(self._host_grads, gradients).wait()

    def store(self) -> None:
        """Writes the updated weights to the memory or file from which the forward reads them. Writes all other values
        that belong in the file to the file."""
        part, swap_file = self.part, self.part.swapper.swap_file
        if self.has_main_params and isinstance(part.storage, torch.Tensor):
            self._upload(self.view(MAIN_PARAM_KIND, part.dtype), part.storage[self.start : self.stop])
        elif self.has_main_params and part.nvme_shard is not None:
            kind = part.nvme_shard.dtype
            self.view(WEIGHT_KIND, kind).copy_(self.view(MAIN_PARAM_KIND, part.dtype))
            size = round_up_to_pages((self.stop - self.start) * kind.itemsize)
            part.nvme_shard.swap_file.write(
                part.nvme_shard.start + self.start * kind.itemsize, self.buffer.pages(WEIGHT_KIND, size)[:size]
            )
        for start, pages in self._file_pages():
            assert swap_file is not None
            swap_file.write(start, pages)

    def _upload(self, updated: torch.Tensor, weights: torch.Tensor) -> None:
        """Copies weights that the host has updated to the device. The weights pass through pinned memory in the
        device's dtype ([Note: one type, pinned])."""
        if self.part.on_device or self.part.on_host or not self.part.swapper.has_device_memory:
            weights.copy_(updated)
            return
        if updated.dtype != weights.dtype:
            updated = self.view(WEIGHT_KIND, weights.dtype).copy_(updated)
        self.part.swapper.copy_streams.copy(weights, updated).wait()

    def _file_pages(self) -> list[tuple[int, torch.Tensor]]:
        """Returns (offset in the file in bytes, pages of the swap buffer) for each kind of value that the chunk stores
        in the file."""
        pages_in_file = []
        for kind, extent in list(self.part.extents.items()):
            if self.has_states or kind == MAIN_PARAM_KIND:
                size = round_up_to_pages((self.stop - self.start) * extent.dtype.itemsize)
                pages_in_file.append(
                    (extent.start + self.start * extent.dtype.itemsize, self.buffer.pages(kind, size)[:size])
                )
        return pages_in_file

    # --- optimizer step

    def set_grad(self, scale: float) -> None:
        """Sets the gradients of the chunk's parameters, multiplied by `scale`."""
        assert self.gradients is not None
        if self._host_grads is None:  # the chunk was fetched before gradients were complete
            self._download_grads(self.gradients)
        grads, self._host_grads = self.gradients if self._host_grads is None else self._host_grads, None
        # If the states are on the device, the optimizer needs the gradients on the device.
        grads = grads.to(self.part.device) if self.part.on_device else grads
        scaled = (
            scale_gradients(grads.to(self.part.dtype, copy=True), scale)
            if self.has_main_params
            else scale_gradients(grads, scale)
            if scale != 1.0
            else grads
        )
        for run, piece in zip(self.params, self.split(scaled), strict=True):
            run.grad = None if run.skipped else piece

    def clear_grad(self, optimizer: torch.optim.Optimizer) -> bool:
        """Clears the gradients after the update. If the update has created states, allocates storage for these states
        and returns True. Otherwise returns False."""
        for run in self.params:
            run.grad = None
        example = next((run for run in self.params if not run.has_no_state), None)
        if example is None or (self.has_states and not any(run.needs_new_state for run in self.params)):
            return False
        for key, first in sorted(optimizer.state.get(example, {}).items()):
            if is_elementwise(first, example):
                self.part.allocate(key, first.dtype)
                for run, piece in zip(self.params, self.split(self.view(key, first.dtype)), strict=True):
                    if run.has_no_state:
                        piece.zero_()
                    elif run.needs_new_state or not self.has_states:
                        optimizer.state[run][key] = piece.copy_(optimizer.state[run][key])
        self.has_states = True
        return True

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """Splits parameters so that each of `tensors` whose name is in `names` has separate parameters. The positions
        in `tensors` count from the start of the parameter group's shard."""
        at = self.unit_range.start
        local = [TensorExtent(each.start - at, each.stop - at, each.name) for each in tensors]
        before, self.runs = self.params, isolate_tensors(self.runs, local, names)
        self.params = make_shard_params(self.updated, self.runs)
        replace_params(optimizer, before, self.params)

    def init_states(self, optimizer: torch.optim.Optimizer, scalars: ScalarValues, others: ScalarValuesByParam) -> None:
        """Creates the states of the chunk, which a checkpoint then fills."""
        parts = {
            kind: self.split(self.view(kind, dtype))
            for kind, dtype in self.part.dtypes.items()
            if kind != MAIN_PARAM_KIND
        }
        for at, run in enumerate(self.params):
            set_param_state(optimizer, run, {kind: views[at] for kind, views in parts.items()}, scalars, others)
        self.has_states = bool(parts)


class OffloadedPart:
    """A part of a shard, which begins at element `start` of the shard. `on_device`: whether the states of the part are
    on the device. `on_host`: whether its weights are offloaded. `dtypes` has an entry for each kind of state and for
    the main weights. The values of a kind are stored either in memory (`in_memory`) or in the file (`extents`)."""

    def __init__(
        self,
        swapper: StateSwapper,
        storage: torch.Tensor | NvmeShard,
        dtype: torch.dtype,
        runs: Sequence[ParamRun],
        part: OffloadSplit,
        on_device: bool,
    ) -> None:
        """`storage` contains the weights that the forward reads. `dtype` is the dtype of the update. Weights that have
        this dtype, and that the processor which runs the update can access, are updated in place. Weights in a file are
        swapped like states."""
        self.swapper, self.dtype, self.start, self.on_host, self.on_device = (
            swapper,
            dtype,
            part.start,
            part.weights_wait,
            on_device,
        )
        self.nvme_shard = None if isinstance(storage, torch.Tensor) else storage
        self.storage = storage
        values = storage if isinstance(storage, torch.Tensor) else storage.full()
        self.numel, self.device = len(values), swapper.device
        self.has_main_params = dtype != values.dtype or (
            not on_device and swapper.has_device_memory and not self.on_host
        )
        self.dtypes: dict[str, torch.dtype] = {}
        self.in_memory: dict[str, torch.Tensor] = {}
        self.extents: dict[str, FileExtent] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        if self.has_main_params:
            self.allocate(MAIN_PARAM_KIND, dtype)
        elif self.nvme_shard is not None:
            self.extents[MAIN_PARAM_KIND] = FileExtent(self.nvme_shard.start, dtype)
        # An accelerator updates its resident part as one chunk.
        at_once = on_device and not backend_of(self.device).memory_is_host and self.nvme_shard is None
        size = self.numel if at_once else CHUNK_ELEMENTS
        self.chunks = [
            OffloadedChunk(self, first, min(first + size, self.numel)) for first in range(0, self.numel, size)
        ]
        for chunk in self.chunks:
            last = chunk.unit_range.stop
            chunk_runs = [
                each.clip(chunk.unit_range.start, last)
                for each in runs
                if each.start < last and each.stop > chunk.unit_range.start
            ]
            updated = values[chunk.start : chunk.stop]
            if self.has_main_params:
                chunk.buffer.wait_stored()
                updated = chunk.view(MAIN_PARAM_KIND, dtype).copy_(updated)
                swapper.store(chunk)
            elif self.nvme_shard is not None:
                updated = chunk.view(MAIN_PARAM_KIND, dtype)
            chunk.updated, chunk.runs = updated, chunk_runs
            chunk.params = make_shard_params(updated, chunk_runs)

    @property
    def main_params(self) -> torch.Tensor:
        """Returns the tensor that stores the weights which the update changes."""
        if isinstance(self.storage, torch.Tensor) and not self.has_main_params:
            return self.storage
        (whole,) = self.full(MAIN_PARAM_KIND)
        return whole

    def allocate(self, kind: str, dtype: torch.dtype) -> None:
        """Allocates zeros of `kind` for all elements of the part."""
        if kind in self.dtypes:
            return
        self.dtypes[kind] = dtype
        if self.on_device:
            self.in_memory[kind] = torch.zeros(self.numel, dtype=dtype, device=self.device)
        elif self.swapper.state_file is not None:
            self.extents[kind] = FileExtent(self.swapper.state_file.extend(self.numel * dtype.itemsize), dtype)
        else:
            self.in_memory[kind] = self.swapper.backend.host_buffer(self.numel, dtype).zero_()

    def full(self, kind: str) -> list[torch.Tensor]:
        """Returns a list with one tensor, which stores all values of `kind` (writes to the tensor change the stored
        values). Returns an empty list if the part has no values of `kind`."""
        self.swapper.quiesce()
        if kind in self.in_memory:
            return [self.in_memory[kind]]
        if kind in self.extents and kind not in self._mapped:
            assert self.swapper.swap_file is not None
            extent = self.extents[kind]
            self._mapped[kind] = self.swapper.swap_file.map(extent.start, self.numel, extent.dtype)
        return [self._mapped[kind]] if kind in self._mapped else []

    def unmap(self) -> None:
        """Drops the mappings of the file. Called before the next update writes to the file."""
        self._mapped.clear()

    def bytes(self, *kinds: str) -> int:
        """Returns the number of bytes of the values of `kinds`."""
        return self.numel * sum(self.dtypes[kind].itemsize for kind in kinds if kind in self.dtypes)


class OffloadedShard(OptimizerShard):
    """A shard of which some parts are offloaded."""

    def __init__(
        self,
        swapper: StateSwapper,
        storages: Sequence[torch.Tensor | NvmeShard],
        dtype: torch.dtype,
        runs: Sequence[ParamRun],
        parts: Sequence[OffloadSplit],
    ) -> None:
        """`storages` contains the weights of each of `parts`, as a tensor or as a range of a file."""
        swapper.copy_streams.wait_for_compute()  # the compute stream may still be writing the weights
        self.swapper = swapper
        self.splits = [
            OffloadedPart(swapper, storage, dtype, runs, part, on_device=not part.states_wait)
            for storage, part in zip(storages, parts, strict=True)
        ]
        self.chunks = [chunk for part in self.splits for chunk in part.chunks]
        self.has_main_params = any(part.has_main_params for part in self.splits)
        self.params = [run for chunk in self.chunks for run in chunk.params]

    def isolate(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[TensorExtent], names: Collection[str]
    ) -> None:
        """Splits parameters so that each of `tensors` whose name is in `names` has separate parameters."""
        for chunk in self.chunks:
            chunk.isolate(optimizer, tensors, names)
        self.params = [run for chunk in self.chunks for run in chunk.params]
        self.isolated = [run for run in self.params if run.isolated]

    @property
    def in_file(self) -> bool:
        """Whether weights are in a file."""
        return any(part.nvme_shard is not None for part in self.splits)

    @property
    def parts(self) -> list[torch.Tensor]:
        """Returns the main weights of each part, in order."""
        return [part.main_params for part in self.splits]

    @property
    def flat(self) -> torch.Tensor:
        """Returns the main weights as one flat tensor. The shard must have exactly one part."""
        (tensor,) = self.parts
        return tensor

    def unmap(self) -> None:
        """Drops the mappings of the file. Called before the update writes to the file."""
        for part in self.splits:
            part.unmap()

    def bytes(self) -> int:
        """Returns the number of bytes of main weights on the device."""
        return sum(part.bytes(MAIN_PARAM_KIND) for part in self.splits if part.on_device)

    def state_bytes(self) -> int:
        """Returns the number of bytes of states on the device that are not counted in the optimizer's own state. If the
        plan does not offload states, all states are counted there."""
        resident = [part for part in self.splits if part.on_device and self.swapper.optimizer]
        return sum(part.bytes(*(kind for kind in part.dtypes if kind != MAIN_PARAM_KIND)) for part in resident)

    def offloaded_bytes(self) -> int:
        """Returns the number of bytes of states and separate main weights in host memory or in the file. Returns 0 if
        the plan does not offload states."""
        return (
            sum(part.bytes(*part.dtypes) for part in self.splits if not part.on_device) if self.swapper.optimizer else 0
        )

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing, because each chunk stores its own states."""

    def state_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
        """Returns for each kind of state the tensors that store it, one for each part."""
        kinds = sorted({kind for part in self.splits for kind in part.dtypes} - {MAIN_PARAM_KIND})
        return {kind: [tensor for part in self.splits for tensor in part.full(kind)] for kind in kinds}

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        """Creates the states, which a checkpoint then fills. See `OptimizerShard.init_states`."""
        self.swapper.quiesce()
        for part in self.splits:
            for kind, name in kinds.items():
                part.allocate(kind, getattr(torch, name))
        for chunk in self.chunks:
            chunk.init_states(optimizer, scalars, others)


def inverse_scale(scale: float) -> float:
    """Returns the float32 number by which gradients are divided to multiply them by `scale`.

    >>> inverse_scale(0.25), inverse_scale(0.3) == 1 / 0.3
    (4.0, False)
    """
    return ctypes.c_float(1.0 / scale).value


def scale_gradients(gradients: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiplies `gradients` by `scale` in place, and returns them. Those in float32 are divided by `inverse_scale`, as
    torch's fused optimizers do, so that all plans round equally."""
    return gradients.div_(inverse_scale(scale)) if gradients.dtype == torch.float32 else gradients.mul_(scale)
