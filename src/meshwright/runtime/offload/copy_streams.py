"""Copies between the memory of a device and that of its host, on streams of their own, one for each direction: beside
what the device computes,
and beside each other.

[Note: one type, pinned] The driver copies by itself, while the host goes on, only between memory of one type whose host
side is pinned; anything
else it casts on the host first, into fresh memory that is not. So what has another type here than there is cast before
it goes down, and into a
pinned buffer before it goes up. Where the memory of ranks is the host's (CPU) a copy is made at once, and nothing is
waited for.
"""

from __future__ import annotations

import torch

from meshwright.runtime.backend import DeviceEvent, backend_of


class CopyEvent:
    """The end of a copy: until then neither side may be written, or what arrives be read."""

    def __init__(self, event: DeviceEvent | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """The host does."""
        if self._event is not None:
            self._event.synchronize()

    def make_compute_wait(self) -> None:
        """What the device is given from here on waits for it; the host goes on."""
        if self._event is not None:
            self._event.wait()


COPY_DONE = CopyEvent()


class CopyStreams:
    """Of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._down, self._up = self._backend.stream(device), self._backend.stream(device)

    def wait_for_compute(self) -> None:
        """What is copied from here on comes after what the device was given to compute so far: called by the thread
        that gives it."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(self._backend.current_stream())

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Begin to copy, in any thread, between both sides of one type whose host side is pinned."""
        assert into.dtype == source.dtype, f"{source.dtype} is to be cast to {into.dtype} before"
        stream = self._up if backend_of(into.device).has_streams else self._down
        if stream is None:
            into.copy_(source)
            return COPY_DONE
        with self._backend.use_stream(stream):
            into.copy_(source, non_blocking=True)
            return CopyEvent(stream.record_event())
