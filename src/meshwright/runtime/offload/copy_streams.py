"""Copies between device and host memory on two separate streams, one per direction. The copies overlap with compute and
with each other. All offloading of this package uses these streams.

[Note: one type, pinned] torch copies asynchronously only if source and target have the same dtype and the host side is
pinned. Otherwise torch first casts on the host, into new memory that is not pinned. So callers cast on the device
before a device-to-host copy, and cast into a pinned buffer before a host-to-device copy. On CPU ranks a copy is
synchronous.
"""

from __future__ import annotations

import torch

from meshwright.runtime.backend import DeviceEvent, backend_of


class CopyEvent:
    """The completion of a copy. Until the copy is complete, nobody may write to its source or target, or read its
    target."""

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
"""The event of a copy that is already complete."""


class CopyStreams:
    """The copy streams of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._down, self._up = self._backend.stream(device), self._backend.stream(device)

    def wait_for_compute(self) -> None:
        """Makes later copies wait for the compute work that is queued so far. Must be called in the thread that queued
        this work."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(self._backend.current_stream())

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Starts a copy from `source` to `into`. May be called in any thread. Both sides must have the same dtype, and
        the host side must be pinned."""
        assert into.dtype == source.dtype, f"cast {source.dtype} to {into.dtype} before the copy"
        stream = self._up if backend_of(into.device).has_streams else self._down
        if stream is None:
            into.copy_(source)
            return COPY_DONE
        with self._backend.use_stream(stream):
            into.copy_(source, non_blocking=True)
            return CopyEvent(stream.record_event())
