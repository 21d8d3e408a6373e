"""Swaps offloaded optimizer states through a few buffers during the update, like DeepSpeed's PipelinedOptimizerSwapper.
The updater (optim/updater.py) calls it.

[Note: windows] The shard of a parameter group is cut into chunks of CHUNK_ELEMENTS. Each chunk consists of complete
parameters of the optimizer, so an update with offload is bit for bit equal to an update without offload. A chunk is
fetched into a buffer, updated in the buffer, and stored. Meanwhile other threads fetch the next chunks and store the
previous chunks. At most SWAP_BUFFERS offloaded chunks have buffers at the same time, however many states are offloaded.
Chunks whose states are not offloaded have separate buffers.

[Note: two offload ratios] The last elements of each shard are offloaded. One ratio applies to weights and one to states
(spec/layout.py, which the planner uses too). All layers have the same ratios, so traffic is distributed as evenly as
the layers. Both offloaded ranges stop at the end of the shard. So the elements whose states are offloaded are, first of
all, those whose weights are offloaded: the host updates these, and copies nothing to the device. Resident states are
updated in chunks on the device, without fetching or storing. Source: Rajbhandari et al., ZeRO-Infinity, arXiv
2104.07857, sections 5.2 (overlap-centric design) and 6.3 (the infinity offload engine).
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from meshwright.runtime.backend import Backend, backend_of
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.runtime.offload.swap_file import SwapFile, page_aligned_buffer, round_up_to_pages
from meshwright.spec.enums import ACTIVATION_OFFLOADS, DISK_OFFLOADS, OPTIMIZER_OFFLOADS, PARAMETER_OFFLOADS, Offload
from meshwright.spec.layout import CHUNK_ELEMENTS, SWAP_BUFFERS, OffloadSplit, offload_splits
from meshwright.spec.plan import Plan

PREFETCH_CHUNKS = SWAP_BUFFERS - 2
"""Number of chunks that are fetched in advance, in addition to the chunk that is updated next."""

COMPLETED_FUTURE: Future[None] = Future()
"""A completed future, used as the fetch of a resident chunk, which needs no fetch."""
COMPLETED_FUTURE.set_result(None)


class SwapBuffer:
    """Memory for one chunk. The memory of each kind of state, such as momentum, is allocated on first use. Pages that
    are never written use no memory."""

    def __init__(self, backend: Backend | None = None) -> None:
        """`backend`: the backend of the device, if the memory must be pinned."""
        self.backend = backend
        self._kinds: dict[str, torch.Tensor] = {}
        self._touched: dict[str, int] = {}
        self._storing: Future[None] | None = None

    def pages(self, kind: str, size: int) -> torch.Tensor:
        """Returns memory of whole pages for at least `size` bytes of the state `kind`."""
        memory = self._kinds.get(kind)
        if memory is None or memory.numel() < size:
            capacity = max(size, CHUNK_ELEMENTS * 8)
            memory = self._kinds[kind] = (
                page_aligned_buffer(capacity) if self.backend is None else self.backend.host_buffer(capacity)
            )
        self._touched[kind] = max(size, self._touched.get(kind, 0))
        return memory

    @property
    def touched(self) -> int:
        """The number of bytes of the buffer that have been used."""
        return sum(self._touched.values())

    def set_store(self, future: Future[None]) -> None:
        """Records `future`, which completes when the contents of this buffer are stored."""
        self._storing = future

    def wait_stored(self) -> None:
        """Waits until the contents of the buffer are stored. Raises the error of a failed store."""
        future, self._storing = self._storing, None
        if future is not None:
            future.result()


class SwapChunk(Protocol):
    """Elements of a parameter group that are updated together. `index` gives the order of updates. `resident`: whether
    the chunk needs no fetch, because its states are on the device."""

    index: int
    buffer: SwapBuffer
    resident: bool

    def fetch(self) -> None:
        """Fills the buffer from storage. Runs in a thread."""

    def store(self) -> None:
        """Writes the buffer to storage. Runs in a thread."""


W = TypeVar("W", bound=SwapChunk)
T = TypeVar("T")


class StateSwapper:
    """Swaps the states of one rank: its swap file, its buffers, and the threads that copy between them."""

    def __init__(
        self,
        folder: Path | None,
        device: torch.device,
        optimizer: Offload | None,
        state_percent: int = 100,
        weights: Offload | None = None,
        weight_percent: int = 100,
    ) -> None:
        """`folder`: the folder of the swap file, None if nothing is offloaded to files. `optimizer`: the offload target
        of the states, None if no states are offloaded. `state_percent`: the percentage of the states to offload.
        `weights` and `weight_percent`: the same for weights."""
        self.weights, self._state_percent, self._weight_percent = weights, state_percent, weight_percent
        self._rotated = 0
        self._resident_buffers: list[SwapBuffer] = []
        self._fetching: deque[tuple[SwapChunk, Future[None]]] = deque()
        self.swap_file = None if folder is None else SwapFile(folder)
        self.device, self.optimizer = device, optimizer
        self.state_file = None if optimizer not in DISK_OFFLOADS else self.swap_file
        """The file for states. None if states are in memory."""
        self.backend = backend_of(device)
        self.has_device_memory = not self.backend.memory_is_host
        """Whether the device has separate memory. If so, updates on the host need copies."""
        self.copy_streams = CopyStreams(device)
        self.buffers = [SwapBuffer(self.backend if self.backend.has_streams else None) for _ in range(SWAP_BUFFERS)]
        self.num_chunks = 0
        self.wait_timer = WaitTimer.of(device)
        """Measures the time for which this rank waits for transfers."""
        self._idle: list[tuple[torch.Tensor, CopyEvent]] = []
        self._acquired_bytes = self._peak_bytes = 0
        self._pool = ThreadPoolExecutor(SWAP_BUFFERS, "offload", self.backend.select, (device,))

    def split(self, numel: int, frozen: bool = False) -> list[OffloadSplit]:
        """Returns the parts, resident and offloaded, of a shard of `numel` elements. `frozen`: whether the shard is not
        trained, and so has no states. On CPU ranks, weights are offloaded only to disk, because they are in host memory
        anyway."""
        weights = (
            self._weight_percent
            if self.weights in DISK_OFFLOADS or (self.weights is not None and self.has_device_memory)
            else 0
        )
        return offload_splits(numel, weights, self._state_percent if self.optimizer is not None and not frozen else 0)

    def next_buffer(self, resident: bool) -> tuple[int, SwapBuffer]:
        """Returns the index and the buffer of a new chunk. Offloaded chunks use SWAP_BUFFERS buffers in rotation. Each
        resident chunk has a separate buffer."""
        self.num_chunks += 1
        self._rotated += not resident
        if not resident:
            return self.num_chunks - 1, self.buffers[self._rotated % SWAP_BUFFERS]
        self._resident_buffers.append(SwapBuffer())
        return self.num_chunks - 1, self._resident_buffers[-1]

    def store(self, chunk: SwapChunk) -> None:
        """Starts to store `chunk` in a thread."""
        chunk.buffer.set_store(self._pool.submit(chunk.store))

    def prefetch(self, chunks: Sequence[SwapChunk]) -> None:
        """Starts to fetch the first chunks of the next update. `chunks`: all chunks that this update passes to
        `run_pipelined`. Earlier stores of these chunks must be complete."""
        self._fetch(deque(interleave(chunks)))

    @property
    def is_prefetching(self) -> bool:
        """Whether chunks of the next update are being fetched."""
        return bool(self._fetching)

    def run_pipelined(self, chunks: Sequence[W], update: Callable[[W], None]) -> None:
        """Fetches each chunk, calls `update` with it, and stores it. Offloaded chunks run in order of index, and
        resident chunks are distributed among them (`interleave`)."""
        fetched, waiting = self._fetching, deque(interleave(chunks))
        for _ in fetched:
            waiting.popleft()
        while waiting or fetched:
            self._fetch(waiting)
            chunk, fetch = fetched.popleft()
            self.timed_wait(fetch.result)
            update(chunk)  # type: ignore[arg-type]
            self.store(chunk)

    def _fetch(self, waiting: deque[Any]) -> None:
        while waiting and sum(not chunk.resident for chunk, _ in self._fetching) <= PREFETCH_CHUNKS:
            chunk = waiting.popleft()
            self.timed_wait(chunk.buffer.wait_stored)
            self._fetching.append((chunk, COMPLETED_FUTURE if chunk.resident else self._pool.submit(chunk.fetch)))

    def quiesce(self) -> None:
        """Waits for all fetches and stores. Afterwards all results of the last update are stored, and the caller may
        read and write the file."""
        while self._fetching:
            self.timed_wait(self._fetching.popleft()[1].result)
        for buffer in (*self.buffers, *self._resident_buffers):
            self.timed_wait(buffer.wait_stored)

    @property
    def buffer_bytes(self) -> int:
        """The number of bytes of the swap buffers, plus the peak bytes of the buffers of `acquire`."""
        return sum(buffer.touched for buffer in self.buffers) + self._peak_bytes

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in a thread. Returns the future of its result."""
        return self._pool.submit(function)

    def acquire(self, size: int) -> torch.Tensor:
        """Returns a buffer of whole pages with at least `size` bytes. The caller must call `release` after use."""
        fits = [at for at, (pages, _) in enumerate(self._idle) if pages.numel() == round_up_to_pages(size)]
        pages, copy = self._idle.pop(fits[0]) if fits else (self._new_pages(round_up_to_pages(size)), COPY_DONE)
        self.timed_wait(copy.wait)
        self._acquired_bytes += pages.numel()
        self._peak_bytes = max(self._peak_bytes, self._acquired_bytes + sum(each.numel() for each, _ in self._idle))
        return pages

    def _new_pages(self, size: int) -> torch.Tensor:
        for _, copy in self._idle:
            self.timed_wait(copy.wait)
        self._idle.clear()  # groups of equal size follow each other, so idle buffers of other sizes are not needed soon
        return self.backend.host_buffer(size) if self.backend.has_streams else page_aligned_buffer(size)[:size]

    def release(self, pages: torch.Tensor, copy: CopyEvent = COPY_DONE) -> None:
        """Makes the buffer `pages` available again, once the copy `copy` out of it is complete."""
        self._acquired_bytes -= pages.numel()
        self._idle.append((pages, copy))

    def timed_wait(self, wait: Callable[[], object]) -> None:
        """Calls `wait`, and adds the time of the call to `wait_timer`."""
        with self.wait_timer:
            wait()


def interleave(chunks: Sequence[W]) -> list[W]:
    """Returns the offloaded chunks in order of index, with the resident chunks distributed evenly among them. So the
    device updates resident chunks while the disk is busy."""
    places: list[tuple[float, W]] = []
    for resident in (True, False):
        same = sorted((chunk for chunk in chunks if chunk.resident == resident), key=lambda chunk: chunk.index)
        places += [((at + 0.5) / len(same), chunk) for at, chunk in enumerate(same)]
    return [chunk for _, chunk in sorted(places, key=lambda place: place[0])]


def make_state_swapper(plan: Plan, device: torch.device, folder: str | Path | None) -> StateSwapper | None:
    """Returns the swapper for `plan`. Returns None if the plan offloads neither weights nor states. `folder`: None
    means the system's temporary folder."""
    offloads = [what for what in plan.offload if what not in ACTIVATION_OFFLOADS]
    if not offloads:
        return None
    optimizer = next((what for what in offloads if what in OPTIMIZER_OFFLOADS), None)
    files = any(what in DISK_OFFLOADS for what in offloads)
    weights = next((what for what in offloads if what in PARAMETER_OFFLOADS), None)
    path = Path(folder or tempfile.gettempdir()) if files else None
    return StateSwapper(path, device, optimizer, plan.offload_share, weights, plan.weights_share)
