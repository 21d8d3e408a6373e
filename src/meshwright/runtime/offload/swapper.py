"""Where the offloaded states of a rank wait, and the few slots of memory that pass by while they are updated.

[Note: windows] The own run of a flat unit is cut into windows of WINDOW elements, each made of whole runs of the
optimizer (master.py), so
that an update with offload computes bit for bit what one without it does. A window is fetched into its slot, updated
there and stored,
while other threads fetch the next ones and store those before: memory holds SLOTS windows, however large the states
are.

[Note: two shares] Of each run the last elements wait, of weights their share and of states theirs (spec/layout.py cuts
it, which the planner counts
by too): what waits of one layer is as much as of another, so that it comes up as evenly as layers run. States of
weights that wait are the first
that do: they are updated where these are, and nothing of that update comes up. What stays is updated in windows where
training is, of which
nothing is fetched or stored.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.2 (overlap-centric design), section 6.3 (the
infinity offload engine).
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.runtime.offload.swap_file import SwapFile, page_aligned_buffer, round_up_to_pages
from meshwright.spec.enums import ACTIVATION_OFFLOADS, DISK_OFFLOADS, OPTIMIZER_OFFLOADS, PARAMETER_OFFLOADS, Offload
from meshwright.spec.layout import CHUNK_ELEMENTS, SWAP_BUFFERS, OffloadSplit, offload_splits
from meshwright.spec.plan import Plan

PREFETCH_CHUNKS = SWAP_BUFFERS - 2

COMPLETED_FUTURE: Future[None] = Future()
"""Of what stays."""
COMPLETED_FUTURE.set_result(None)


class SwapBuffer:
    """Memory for one window, kind by kind, made when first asked for; never touched pages take none."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._kinds: dict[str, torch.Tensor] = {}
        self._touched: dict[str, int] = {}
        self._storing: Future[None] | None = None

    def pages(self, kind: str, size: int) -> torch.Tensor:
        """The whole pages that hold `size` bytes of `kind`."""
        held = self._kinds.get(kind)
        if held is None or held.numel() < size:
            most = max(size, CHUNK_ELEMENTS * 8)
            held = self._kinds[kind] = (
                torch.empty(most, dtype=torch.uint8, pin_memory=True) if self.pinned else page_aligned_buffer(most)
            )
        self._touched[kind] = max(size, self._touched.get(kind, 0))
        return held

    @property
    def touched(self) -> int:
        """Bytes that it takes."""
        return sum(self._touched.values())

    def set_store(self, future: Future[None]) -> None:
        self._storing = future

    def wait_stored(self) -> None:
        """What was in it is stored. Raises what storing raised."""
        future, self._storing = self._storing, None
        if future is not None:
            future.result()


class SwapChunk(Protocol):
    """A part of a unit that is updated at a time."""

    index: int
    buffer: SwapBuffer
    resident: bool

    def fetch(self) -> None:
        """Fill the slot. Runs in a thread of its own."""

    def store(self) -> None:
        """Empty the slot. Runs in a thread of its own."""


W = TypeVar("W", bound=SwapChunk)
T = TypeVar("T")


class StateSwapper:
    """Of one rank: its scratch file, its slots, the threads between them."""

    def __init__(
        self,
        folder: Path | None,
        device: torch.device,
        optimizer: Offload | None,
        states: int = 100,
        weights: Offload | None = None,
        share: int = 100,
    ) -> None:
        """`folder` None: nothing waits in files. `optimizer`: where `states` hundredths of its states wait, None where
        they stay. `weights`: where
        `share` hundredths of these do."""
        self.weights, self._state_percent, self._weight_percent = weights, states, share
        self._rotated = 0
        self._resident_buffers: list[SwapBuffer] = []
        self._fetching: deque[tuple[SwapChunk, Future[None]]] = deque()
        self.swap_file = None if folder is None else SwapFile(folder)
        self.device, self.optimizer = device, optimizer
        self.state_file = None if optimizer not in DISK_OFFLOADS else self.swap_file
        """The file that states wait in; None where they are in memory."""
        self.pinned = backend_of(device).has_streams
        """Whether memory of the host is pinned."""
        self.has_device_memory = not backend_of(device).memory_is_host
        """Whether the device has memory of its own: what it holds and the host updates goes down and comes up."""
        self.copy_streams = CopyStreams(device)
        self.buffers = [SwapBuffer(self.pinned) for _ in range(SWAP_BUFFERS)]
        self.num_chunks = 0
        self.wait_timer = WaitTimer.of(device)
        """Runs while what is on its way is waited for."""
        self._idle: list[tuple[torch.Tensor, CopyEvent]] = []
        self._acquired_bytes = self._peak_bytes = 0
        self._pool = ThreadPoolExecutor(SWAP_BUFFERS, "offload")

    def split(self, numel: int, frozen: bool = False) -> list[OffloadSplit]:
        """How a rank's run of a unit lies; of a `frozen` one there are no states. The weights of ranks on CPUs are in
        their host's memory anyway."""
        weights = (
            self._weight_percent
            if self.weights in DISK_OFFLOADS or (self.weights is not None and self.has_device_memory)
            else 0
        )
        return offload_splits(numel, weights, self._state_percent if self.optimizer is not None and not frozen else 0)

    def next_buffer(self, stays: bool) -> tuple[int, SwapBuffer]:
        """The next window's number and slot: neighbours never share a slot, and one that stays has its own."""
        self.num_chunks += 1
        self._rotated += not stays
        if not stays:
            return self.num_chunks - 1, self.buffers[self._rotated % SWAP_BUFFERS]
        self._resident_buffers.append(SwapBuffer(False))
        return self.num_chunks - 1, self._resident_buffers[-1]

    def store(self, window: SwapChunk) -> None:
        """Start to empty its slot."""
        window.buffer.set_store(self._pool.submit(window.store))

    def prefetch(self, windows: Sequence[SwapChunk]) -> None:
        """Begin to fetch the first of those that `pass_by` will be given, once nothing of them is written any more."""
        self._fetch(deque(interleave(windows)))

    @property
    def is_prefetching(self) -> bool:
        """Whether that has begun, for an update that has not."""
        return bool(self._fetching)

    def run_pipelined(self, windows: Sequence[W], update: Callable[[W], None]) -> None:
        """`update` each of `windows`, fetched before and stored after, in order of their numbers; between them those
        that stay."""
        fetched, waiting = self._fetching, deque(interleave(windows))
        for _ in fetched:
            waiting.popleft()
        while waiting or fetched:
            self._fetch(waiting)
            window, coming = fetched.popleft()
            self.timed_wait(coming.result)
            update(window)  # type: ignore[arg-type]
            self.store(window)

    def _fetch(self, waiting: deque[Any]) -> None:
        while waiting and sum(not window.resident for window, _ in self._fetching) <= PREFETCH_CHUNKS:
            window = waiting.popleft()
            self.timed_wait(window.buffer.wait_stored)
            self._fetching.append((window, COMPLETED_FUTURE if window.resident else self._pool.submit(window.fetch)))

    def quiesce(self) -> None:
        """Everything is stored: the file can be read and written, and the weights are those of the update."""
        while self._fetching:
            self.timed_wait(self._fetching.popleft()[1].result)
        for slot in (*self.buffers, *self._resident_buffers):
            self.timed_wait(slot.wait_stored)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the slots, and of buffers when they were most."""
        return sum(slot.touched for slot in self.buffers) + self._peak_bytes

    def submit(self, deed: Callable[[], T]) -> Future[T]:
        """In a thread of its own."""
        return self._pool.submit(deed)

    def acquire(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes in whole pages."""
        fits = [at for at, (pages, _) in enumerate(self._idle) if pages.numel() == round_up_to_pages(size)]
        pages, landing = self._idle.pop(fits[0]) if fits else (self._new_pages(round_up_to_pages(size)), COPY_DONE)
        self.timed_wait(landing.wait)
        self._acquired_bytes += pages.numel()
        self._peak_bytes = max(self._peak_bytes, self._acquired_bytes + sum(each.numel() for each, _ in self._idle))
        return pages

    def _new_pages(self, size: int) -> torch.Tensor:
        for _, landing in self._idle:
            self.timed_wait(landing.wait)
        self._idle.clear()  # of other sizes: units of one kind follow each other
        return (
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if self.pinned else page_aligned_buffer(size)[:size]
        )

    def release(self, pages: torch.Tensor, landing: CopyEvent = COPY_DONE) -> None:
        """It back; it is lent again once what is copied out of it has landed."""
        self._acquired_bytes -= pages.numel()
        self._idle.append((pages, landing))

    def timed_wait(self, wait: Callable[[], object]) -> None:
        """For something under way, on the clock."""
        with self.wait_timer:
            wait()


def interleave(windows: Sequence[W]) -> list[W]:
    """In order of their numbers, those that stay evenly between the others: there is something to update while a disk
    is waited for."""
    places: list[tuple[float, W]] = []
    for stays in (True, False):
        kind = sorted((window for window in windows if window.resident == stays), key=lambda window: window.index)
        places += [((at + 0.5) / len(kind), window) for at, window in enumerate(kind)]
    return [window for _, window in sorted(places, key=lambda place: place[0])]


def make_state_swapper(plan: Plan, device: torch.device, folder: str | Path | None) -> StateSwapper | None:
    """What `plan` needs; None where neither weights nor the optimizer wait elsewhere."""
    kept = [what for what in plan.offload if what not in ACTIVATION_OFFLOADS]
    if not kept:
        return None
    optimizer = next((what for what in kept if what in OPTIMIZER_OFFLOADS), None)
    files = any(what in DISK_OFFLOADS for what in kept)
    weights = next((what for what in kept if what in PARAMETER_OFFLOADS), None)
    place = Path(folder or tempfile.gettempdir()) if files else None
    return StateSwapper(place, device, optimizer, plan.offload_share, weights, plan.weights_share)
