"""Copies between device and host memory on two separate streams, one per direction. Copies overlap with compute and
with each other.

[Note: one type, pinned] The driver copies asynchronously only if both sides have one dtype and the host side is pinned.
Otherwise it first casts on the host, into new memory that is not pinned. So before a device-to-host copy, the tensor is
cast on the device. Before a host-to-device copy, it is cast into a pinned buffer. On CPU ranks a copy is synchronous.
"""

from __future__ import annotations

import torch

from meshwright.runtime.backend import DeviceEvent, backend_of


class CopyEvent:
    """The completion of a copy. Until then, neither source nor target may be written, and the target may not be
    read."""

    def __init__(self, event: DeviceEvent | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Makes the host wait for the copy."""
        if self._event is not None:
            self._event.synchronize()

    def make_compute_wait(self) -> None:
        """Makes the compute stream wait for the copy. The host continues."""
        if self._event is not None:
            self._event.wait()


COPY_DONE = CopyEvent()


class CopyStreams:
    """The copy streams of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._down, self._up = self._backend.stream(device), self._backend.stream(device)

    def wait_for_compute(self) -> None:
        """Makes later copies wait for the compute work that is queued so far. Must be called by the thread that queues
        the work."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(self._backend.current_stream())

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Starts a copy from `source` to `into`. May be called in any thread. Both sides must have one dtype, and the
        host side must be pinned."""
        assert into.dtype == source.dtype, f"{source.dtype} is to be cast to {into.dtype} before"
        stream = self._up if backend_of(into.device).has_streams else self._down
        if stream is None:
            into.copy_(source)
            return COPY_DONE
        with self._backend.use_stream(stream):
            into.copy_(source, non_blocking=True)
            return CopyEvent(stream.record_event())
