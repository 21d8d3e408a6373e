"""Offloads saved activations to host memory or to a file between forward and backward. `RecomputePolicy`
(activation_recompute.py) uses it for each block.

[Note: overlapped offload] While a block runs forward, the activations of the previous block are copied to the host. The
device frees them when the running block ends. While a block runs backward, the activations of the preceding block are
copied back. So at most the activations of two blocks are on the device (planner/cost/offload.py). The activations of
the last block of a forward stay on the device until this rank begins another forward or backward. In most schedules it
next begins the backward of the same micro-batch.

On an accelerator, copies use separate streams and pinned memory, and threads write files. CPU ranks write the
activations to files without a copy, because their memory is host memory. A CPU rank that offloads to host memory copies
each tensor when it is saved, and drops the original at the end of the block.

[Note: one stream's memory] The compute stream allocates all device memory, and frees it only after it has waited for
the copy. So no copy reads or writes memory that already has another use, even if a step ends in an error
(`OffloadedTensor.__del__`).

A storage that a block saves several times (as the input of three projections, or as attention's output and its views)
is transferred once. Sparse or subclassed tensors, and tensors on other devices, are not offloaded. If a saved tensor is
written to before its copy is complete, backward raises an error, as autograd does for a tensor that is not offloaded.

Source of the streams and their synchronisation: torchtune's OffloadActivations. torch's save_on_cpu copies on the
compute stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime.backend import backend_of
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.runtime.offload.swap_file import PAGE_BYTES, ActivationStore


class ActivationOffload:
    """Offloads the activations of one rank, whose blocks run on `device`. `weights`: the ids (`storage_id`) of storages
    that are never offloaded. `depot`: the store that writes activations to a file; None to offload to host memory."""

    def __init__(self, device: torch.device, weights: Collection[int], depot: ActivationStore | None = None) -> None:
        self.device, self.weights, self.depot = device, weights, depot
        self.ferry = CopyStreams(device) if depot is None else depot.copy_streams
        self.beyond = backend_of(device).has_streams
        """Whether the device has separate memory, with asynchronous copies."""
        self._last = self._opened = _no_block

    @contextmanager
    def collect_block(self, place: int) -> Iterator[BlockActivations]:
        """Collects the activations that a block saves in its forward, which runs inside the context. `place`: the index
        of the block in its stage."""
        before = self._last()
        if before is not None:
            before.leave()
        block = BlockActivations(self, before if before is not None and before.place == place - 1 else None, place)
        try:
            with saved_tensors_hooks(block.keep, unpack_activation):
                yield block
            if before is not None:
                before.let_go()
        finally:
            block.finish()
        self._last = weakref.ref(block)

    def open(self, block: BlockActivations) -> None:
        """Prepares the backward of `block`. Fetches its activations, and starts to fetch those of the preceding block.
        Frees the device memory of the block whose forward or backward ran last."""
        opened, last = self._opened(), self._last()
        if opened is block:
            return
        self._opened = weakref.ref(block)
        others = [other for other in (opened, last) if other is not None and other is not block]
        for other in others:
            other.leave()
        block.fetch()
        for other in others:
            other.let_go()
        before = block.before()
        if before is not None:
            before.fetch()


class BlockActivations:
    """The saved activations of one forward of a block. They exist until the block's backward has used them. `before`:
    the activations of the previous block of the same forward, if any."""

    def __init__(self, rank: ActivationOffload, before: BlockActivations | None, place: int) -> None:
        self.rank, self.place = rank, place
        self.before = _no_block if before is None else weakref.ref(before)
        self._parcels: list[weakref.ref[OffloadedTensor]] = []
        self._seen: dict[tuple[int, int], OffloadedTensor] = {}

    @property
    def parcels(self) -> list[OffloadedTensor]:
        """The saved tensors that backward still needs."""
        return [parcel for each in self._parcels if (parcel := each()) is not None]

    def keep(self, tensor: torch.Tensor) -> Any:
        """The pack hook of autograd. Returns what autograd saves instead of `tensor`: the tensor itself, or its
        offloaded storage and its `TensorMeta`."""
        if not self._is_offloadable(tensor):
            return tensor
        if tensor.nbytes * 2 < tensor.untyped_storage().nbytes():  # a view of less than half of its storage is copied
            own = tensor.detach().clone()
            return self._offload(own), TensorMeta.of(own)
        key = storage_id(tensor), tensor._version
        parcel = self._seen.get(key)
        if parcel is None:
            # The entry of `_seen` references the storage, so that no later storage of this forward gets the same id.
            parcel = self._seen[key] = self._offload(tensor)
        return parcel, TensorMeta.of(tensor)

    def _offload(self, tensor: torch.Tensor) -> OffloadedTensor:
        parcel = OffloadedTensor(self, tensor)
        self._parcels.append(weakref.ref(parcel))
        return parcel

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.device.type != self.rank.device.type:
            return False
        large = self.rank.depot is None or tensor.nbytes >= PAGE_BYTES
        return large and storage_id(tensor) not in self.rank.weights

    def finish(self) -> None:
        """Ends the block's forward. A CPU rank that offloads to host memory has already copied all tensors, and frees
        the originals now."""
        self._seen.clear()
        if self.rank.depot is None and not self.rank.beyond:
            self.let_go()

    def leave(self) -> None:
        """Starts to offload all tensors that are not yet offloaded."""
        for parcel in self.parcels:
            parcel.leave()

    def let_go(self) -> None:
        """Waits until all tensors are offloaded, and frees their device memory."""
        for parcel in self.parcels:
            parcel.let_go()

    def fetch(self) -> None:
        """Starts to copy the block's tensors back to the device, except those that are on the device."""
        for parcel in self.parcels:
            parcel.fetch()


class TensorMeta(NamedTuple):
    """The dtype, size, stride and offset of a tensor in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Returns the `TensorMeta` of `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def of_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of `values`, which are the bytes of its whole storage."""
        found: Any = torch.empty(0, dtype=self.dtype, device=values.device)
        return found.set_(values.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[no-any-return]


class OffloadedTensor:
    """One storage that a block saves. It is on the device (`here`), in host memory (`_host`), in the file (at offset
    `_room`), or in transit."""

    def __init__(self, block: BlockActivations, tensor: torch.Tensor) -> None:
        self.block, self.rank, self.depot = block, block.rank, block.rank.depot
        self.here: torch.Tensor | None = storage_bytes(tensor)
        self.size = self.here.numel()
        self._host: torch.Tensor | None = None
        self._room: int | None = None
        self._going: Future[None] | None = None
        """The write to the file, if one is in progress."""
        self._coming: Future[CopyEvent] | None = None
        """The read from the file, if one is in progress."""
        self._landing = COPY_DONE
        """The event of the last copy between device and host."""
        self._version_probe: torch.Tensor | None = version_probe(tensor)
        self._version, self._is_written = tensor._version, False
        if self.depot is None and not self.rank.beyond:
            self.leave()

    # --- forward

    def leave(self) -> None:
        """Starts to copy the storage to host memory or to the file."""
        if self.here is None or self._host is not None or self._room is not None:
            return
        values = self.here if self.depot is not None and not self.rank.beyond else self._copy_to_host(self.here)
        if self.depot is not None:
            self._room = self.depot.allocate(self.size)
            self._going = self.depot.write(self._room, values, self._landing)

    def _copy_to_host(self, here: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `here` in host memory. On an accelerator the copy is in pinned memory, and is filled while
        the device computes."""
        rank, depot = self.rank, self.depot
        self._host = backend_of(rank.device).host_buffer(self.size) if depot is None else depot.new_buffer(self.size)
        rank.ferry.wait_for_compute()
        self._landing = rank.ferry.copy(self._host, here)
        return self._host

    def let_go(self) -> None:
        """Waits until the storage is offloaded, and then frees the device memory."""
        self.leave()
        self._wait_for_file()
        if self.depot is not None:
            self._host = None
        if self.here is not None:
            self._record_write()
            self._landing.make_compute_wait()
            self.here = self._version_probe = None

    def _wait_for_file(self) -> None:
        """Waits for the transfer to or from the file. Raises the error of a failed transfer."""
        going, coming, self._going, self._coming = self._going, self._coming, None, None
        if (going is None and coming is None) or self.depot is None:
            return
        with self.depot.wait_timer:
            if going is not None:
                going.result()
            if coming is not None:
                self._landing = coming.result()

    def _record_write(self) -> None:
        """Records whether the tensor was written to after it was saved. Called before its device memory is freed."""
        at_once = self.depot is None and not self.rank.beyond
        self._is_written |= (
            not at_once and self._version_probe is not None and self._version_probe._version != self._version
        )

    # --- backward

    def fetch(self) -> None:
        """Starts to copy the storage back to the device."""
        rank, depot = self.rank, self.depot
        if self.here is not None or self._coming is not None:
            return
        if rank.beyond:
            self.here = torch.empty(self.size, dtype=torch.uint8, device=rank.device)
            rank.ferry.wait_for_compute()
        if depot is not None:
            assert self._room is not None
            self._host = depot.new_buffer(self.size)
            self._coming = depot.read(self._room, self._host, self.here)
        elif self.here is None:
            self.here = self._host
        else:
            assert self._host is not None
            self._landing = rank.ferry.copy(self.here, self._host)

    def take(self) -> torch.Tensor:
        """Returns the storage as a flat tensor of bytes on the device.

        Raises:
            RuntimeError: the tensor was written to before its copy was complete.
        """
        self.rank.open(self.block)
        self.fetch()
        if self._coming is not None:
            self._wait_for_file()
            self.here = self._host if self.here is None else self.here
            self._host = None
        self._record_write()
        if self._is_written:
            raise RuntimeError(
                "a tensor that a block's backward needs was modified in place after it was saved (off-activations): "
                "let the model create a new tensor instead"
            )
        self._landing.make_compute_wait()
        assert self.here is not None
        return self.here

    def __del__(self) -> None:
        with suppress(Exception):  # disk errors are raised when a tensor is fetched, not here
            for moving in (self._going, self._coming):
                if moving is not None and not moving.cancel():
                    moving.exception()
            if self._coming is not None and not self._coming.cancelled():
                self._landing = self._coming.result()
        with suppress(Exception):
            self._landing.make_compute_wait()
            if self.depot is not None and self._room is not None:
                self.depot.free(self._room, self.size)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage of `tensor` as a flat tensor of bytes."""
    found: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return found.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[no-any-return]


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that shares the version counter of `tensor`."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def storage_id(tensor: torch.Tensor) -> int:
    """Returns an id of the storage of `tensor`. The id stays constant as long as the storage object exists, even if its
    memory is freed and allocated again (ZeRO 3)."""
    return tensor.untyped_storage()._cdata


def unpack_activation(packed: Any) -> torch.Tensor:
    """The unpack hook of autograd. Returns the tensor for which `BlockActivations.keep` returned `packed`."""
    if isinstance(packed, torch.Tensor):
        return packed
    parcel, meta = packed
    return meta.of_bytes(parcel.take())  # type: ignore[no-any-return]


def _no_block() -> BlockActivations | None:
    return None
