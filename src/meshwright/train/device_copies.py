"""Copies the state of a rank from an accelerator to its in-memory checkpoint (memory_checkpointer.py), while the
accelerator trains.

`D2HStaging` copies from an accelerator on a separate stream, directly into the slot, whose memory is pinned at its
first use. An ordinary copy would run on the training stream, wait for earlier kernels and delay later ones. To unpinned
memory, the driver copies in small, slow pieces. If the system does not pin the slots, the copies go through two chunks
of pinned memory: one chunk is filled while the other is read. The digest is computed on the device.

`DeferredText` writes the state that is not in tensors. The optimizer counts its steps on the accelerator, so the thread
that trains would wait for each count. The thread that copies waits instead.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from meshwright.checkpoint.memory_checkpoint import RowSums
from meshwright.runtime.backend import backend_of

PINNED_CHUNK_BYTES = 1 << 25
"""The size of a chunk of pinned memory."""


class D2HStaging:
    """Copies tensors from `device` to slots of a memory file, and sums their rows on the device (`DeviceCopies`). It is
    not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.backend = device, backend_of(device)
        stream = self.backend.stream(device)
        assert stream is not None, f"{device.type} has no streams"
        self.stream = stream
        self.chunks: list[torch.Tensor] = []
        """The chunks of pinned memory if the system does not pin the slots."""
        self.arrived = [self.backend.event(blocking=True) for _ in range(2)]
        self._pinned: dict[int, torch.Tensor] = {}
        self._sums = RowSums(0)
        self._host_sums = RowSums(0)
        self._landing = torch.empty(0)
        self._slot = torch.empty(0)

    def begin(self) -> None:
        """Makes the copy stream wait for all work that the calling thread has submitted to its stream."""
        self.stream.wait_stream(self.backend.current_stream(self.device))

    def in_stream(self) -> AbstractContextManager[Any]:
        """Launches the kernels of the context in the copy stream."""
        return self.backend.use_stream(self.stream)

    def start(self, slot: torch.Tensor) -> None:
        """Begins a copy to the byte vector `slot`, and pins its memory."""
        if not self.chunks and slot.data_ptr() not in self._pinned:
            if self.backend.pin(slot, self.device):
                self._pinned[slot.data_ptr()] = slot
            else:
                self.chunks = [self.backend.host_buffer(PINNED_CHUNK_BYTES) for _ in range(2)]
        self._slot, self._host_sums = slot, RowSums(len(slot))
        with self.in_stream():
            if len(self._landing) != len(self._host_sums.sums):
                self._sums = RowSums(len(slot), self.device)
                self._landing = self.backend.host_buffer(len(self._sums.sums), torch.int64)
            self._sums.sums.zero_()

    def copy(self, source: torch.Tensor, to: int) -> None:
        """Starts to copy the byte vector `source` to offset `to` of the slot."""
        target = self._slot[to : to + len(source)]
        if backend_of(source.device).memory_is_host:
            target.copy_(source)
            self._host_sums.add(to, source)
            return
        with self.in_stream():
            self._sums.add(to, source)
            if not self.chunks:
                target.copy_(source, non_blocking=True)
        for at, part in self.parts(source) if self.chunks else ():
            ctypes.memmove(target.data_ptr() + at, part.data_ptr(), len(part))

    def finish(self) -> RowSums:
        """Waits for all copies. Returns the sums of what was copied, on the CPU."""
        with self.in_stream():
            self._landing.copy_(self._sums.sums, non_blocking=True)
            self.arrived[0].record(self.stream)
        self.arrived[0].synchronize()
        self._host_sums.sums += self._landing
        return self._host_sums

    def unpin(self) -> None:
        """Unpins all slots. Must be called before their file is laid out again."""
        for slot in self._pinned.values():
            self.backend.unpin(slot)
        self._pinned.clear()

    def parts(self, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the bytes of `source`, a uint8 vector on the device, as pairs of offset and bytes in host memory. The
        bytes are valid until the next pair is requested."""

        def begin(chunk: int, at: int, size: int) -> None:
            """Starts the copy of `size` bytes at offset `at` into chunk `chunk`."""
            with self.in_stream():
                self.chunks[chunk][:size].copy_(source[at : at + size], non_blocking=True)
                self.arrived[chunk].record(self.stream)

        for chunk, at, size in double_buffered(
            source.numel(), PINNED_CHUNK_BYTES, begin, lambda chunk: self.arrived[chunk].synchronize()
        ):
            yield at, self.chunks[chunk][:size]


def double_buffered(
    size: int, most: int, start: Callable[[int, int, int], None], arrived: Callable[[int], None]
) -> Iterator[tuple[int, int, int]]:
    """Divides a copy of `size` bytes into parts of at most `most` bytes, which alternate between two chunks. Yields
    each part as (chunk index, offset, length) when it has arrived.

    `start` starts the copy of a part, `arrived` waits for the copy into a chunk. When a part is yielded, the copy of
    the next part into the other chunk has already started.

    >>> said = []
    >>> for part in double_buffered(
    ...     5, 2, lambda *part: said.append(("start", *part)), lambda chunk: said.append(("arrived", chunk))
    ... ):
    ...     said.append(("read", part[0]))
    >>> said[:4]
    [('start', 0, 0, 2), ('start', 1, 2, 2), ('arrived', 0), ('read', 0)]
    >>> said[4:]
    [('start', 0, 4, 1), ('arrived', 1), ('read', 1), ('arrived', 0), ('read', 0)]
    """
    cuts = [(number % 2, at, min(most, size - at)) for number, at in enumerate(range(0, size, most))]
    for cut in cuts[:1]:
        start(*cut)
    for number, cut in enumerate(cuts):
        for following in cuts[number + 1 : number + 2]:
            start(*following)
        arrived(cut[0])
        yield cut


def clone_scalar(value: Any) -> Any:
    """Returns the value of a scalar state of an optimizer, or a clone if the value is on an accelerator. The clone is
    read later, so that training does not wait for it."""
    is_remote = isinstance(value, torch.Tensor) and not backend_of(value.device).memory_is_host
    return value.detach().clone() if is_remote else float(value)


class DeferredText:
    """The JSON text of `value`, in which tensors with one element stand for numbers. `encode` reads the tensors."""

    def __init__(self, value: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._text = json.dumps(value, default=self._mark)

    def _mark(self, tensor: torch.Tensor) -> str:
        self._tensors.append(tensor)
        return f"\0{len(self._tensors)}"

    def encode(self) -> bytes:
        """Waits for the tensors, and returns the text."""
        text = self._text
        for number, tensor in enumerate(self._tensors, 1):
            text = text.replace(json.dumps(f"\0{number}"), json.dumps(float(tensor)))
        return text.encode()
