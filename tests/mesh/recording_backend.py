"""A device with streams and memory of its own, played on the CPU: the runtime takes its paths of accelerators, and each
call of its `Backend` is recorded with its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from meshwright.runtime.backend import Backend, CpuBackend
from meshwright.runtime.offload.swap_file import page_aligned_buffer


class RecordedStream:
    def __init__(self, backend: RecordingBackend) -> None:
        self.backend = backend

    def wait_stream(self, stream: Any) -> None:
        self.backend.touch("wait_stream")

    def record_event(self) -> RecordedEvent:
        self.backend.touch("record_event")
        return RecordedEvent(self.backend)


class RecordedEvent:
    def __init__(self, backend: RecordingBackend) -> None:
        self.backend = backend

    def record(self, stream: Any = None) -> None:
        self.backend.touch("record")

    def query(self) -> bool:
        self.backend.touch("query")
        return True

    def synchronize(self) -> None:
        self.backend.touch("synchronize")

    def wait(self, stream: Any = None) -> None:
        self.backend.touch("wait")

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class RecordingBackend(CpuBackend):
    """Records in `threads` the calls of each thread, and in `unselected` the threads that had not selected the device
    before a call."""

    memory_is_host = False
    has_streams = True
    make_deterministic = Backend.make_deterministic

    def __init__(self) -> None:
        self.local = threading.local()
        self.threads: dict[str, set[str]] = {}
        self.unselected: set[tuple[str, str]] = set()

    def touch(self, call: str) -> None:
        name = threading.current_thread().name.rstrip("_0123456789")
        self.threads.setdefault(name, set()).add(call)
        if not getattr(self.local, "selected", False):
            self.unselected.add((name, call))

    def select(self, device: torch.device) -> None:
        self.local.selected = True
        self.touch("select")

    def synchronize(self, device: torch.device) -> None:
        self.touch("synchronize")

    def stream(self, device: torch.device) -> Any:
        self.touch("stream")
        return RecordedStream(self)

    current_stream: Any = lambda self, device=None: self.stream(device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        self.touch("use_stream")
        return nullcontext()

    def event(self, timing: bool = False, blocking: bool = False) -> Any:
        self.touch("event")
        return RecordedEvent(self)

    def host_buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        self.touch("host_buffer")
        shape = torch.Size((shape,) if isinstance(shape, int) else shape)
        pages = page_aligned_buffer(max(1, shape.numel() * dtype.itemsize))  # as pinned memory is
        return pages[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        self.touch("pin")
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        self.touch("unpin")


Backend.by_type["cpu"] = CpuBackend()  # defining a subclass registers it


@contextmanager
def recording_device() -> Iterator[RecordingBackend]:
    """Inside the context, CPU tensors are on a device with streams."""
    before, Backend.by_type["cpu"] = Backend.by_type["cpu"], RecordingBackend()
    try:
        yield Backend.by_type["cpu"]  # type: ignore[misc]
    finally:
        Backend.by_type["cpu"] = before
