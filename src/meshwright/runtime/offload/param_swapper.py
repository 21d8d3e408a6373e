"""Offloads weight shards of ZeRO 3 to files or host memory, and sums gradients in host memory. The parameter groups
(zero/) use it.

[Note: one layer ahead] While a layer runs, the shard of the next layer is copied to a buffer. The all-gather of the
next layer reads this buffer. A thread reads shards from the file, bypassing the page cache. Shards in pinned host
memory are copied while the device computes (copy_streams.py). The update's writes complete before the next step begins,
so a shard is never read while it is written. Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, sections
5.1.2 and 6.2 (the prefetcher).

[Note: added on the host] The gradients of the first micro-batch are copied into the buffer of the sum. Later gradients
are copied to a pinned buffer, and a thread adds them to the sum in the dtype of gradients. Each addition rounds once,
as on the device. So the sum is bit for bit equal to a sum on the device. At most MAX_INFLIGHT_REDUCE parameter groups
per rank have gradients in flight. The device frees gradients once they are copied. Source: Ren et al., ZeRO-Offload,
arXiv 2101.06840, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.collectives import InterHostReducer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.spec.layout import OffloadSplit


class NvmeShard:
    """A weight shard in the swap file, starting at byte `start`. `values`: the initial weights, a flat tensor."""

    def __init__(self, swapper: StateSwapper, values: torch.Tensor) -> None:
        assert swapper.swap_file is not None
        self.swapper, self.swap_file, self.dtype, self.numel = swapper, swapper.swap_file, values.dtype, values.numel()
        self.start = self.swap_file.extend(self.bytes())
        self._reading: tuple[torch.Tensor, Future[CopyEvent]] | None = None
        self._on_device: torch.Tensor | None = None
        self.write(values)

    def write(self, values: torch.Tensor) -> None:
        """Writes the weights `values` to the file. Blocks until they are written."""
        pages = self.swapper.acquire(self.bytes())
        self._values(pages).copy_(values)
        self.swap_file.write(self.start, pages)
        self.swapper.release(pages)

    def bytes(self) -> int:
        """Returns the number of bytes of the weights."""
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> None:
        """Starts to read the weights, and to copy them to the device. Does nothing if they are already fetched."""
        if self._reading is None:
            pages = self.swapper.acquire(self.bytes())
            if self.swapper.has_device_memory:
                self._on_device = torch.empty(self.numel, dtype=self.dtype, device=self.swapper.device)
                self.swapper.copy_streams.wait_for_compute()
            self._reading = pages, self.swapper.submit(lambda: self._read(pages))

    def _read(self, pages: torch.Tensor) -> CopyEvent:
        """Reads the weights into `pages`, and starts the copy to the device. Runs in a thread. Returns the event of the
        copy."""
        self.swap_file.read(self.start, pages)
        return (
            COPY_DONE
            if self._on_device is None
            else self.swapper.copy_streams.copy(self._on_device, self._values(pages))
        )

    def _values(self, pages: torch.Tensor) -> torch.Tensor:
        return pages[: self.bytes()].view(self.dtype)

    def acquire(self) -> torch.Tensor:
        """Waits for the weights and returns them on the device. The caller must call `release` after use."""
        self.prefetch()
        assert self._reading is not None
        pages, reading = self._reading
        self.swapper.timed_wait(lambda: reading.result().make_compute_wait())
        return self._values(pages) if self._on_device is None else self._on_device

    def release(self) -> None:
        """Frees the memory of the fetched weights."""
        if self._reading is not None:
            pages, reading = self._reading
            copy = reading.result()
            copy.make_compute_wait()  # because the compute stream may reuse the device memory
            self._reading = self._on_device = None
            self.swapper.release(pages, copy)

    def full(self) -> torch.Tensor:
        """Returns the weights as a tensor that maps the file, so that writes to the tensor change the file."""
        self.swapper.quiesce()
        return self.swap_file.map(self.start, self.numel, self.dtype)


class CpuShard:
    """A weight shard in pinned memory of the accelerator's host."""

    def __init__(self, swapper: StateSwapper, values: torch.Tensor) -> None:
        self.swapper, self.dtype = swapper, values.dtype
        self._values = swapper.backend.host_buffer(values.shape, self.dtype).copy_(values)
        self._on_device: torch.Tensor | None = None
        self._copy = COPY_DONE

    def bytes(self) -> int:
        """Returns the number of bytes of the weights."""
        return self._values.numel() * self._values.element_size()

    def prefetch(self) -> None:
        """Starts to copy the weights to the device."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._values, device=self.swapper.device)
            self.swapper.copy_streams.wait_for_compute()
            self._copy = self.swapper.copy_streams.copy(self._on_device, self._values)

    def acquire(self) -> torch.Tensor:
        """Makes the compute stream wait for the weights, and returns them on the device. The caller must call `release`
        after use."""
        self.prefetch()
        assert self._on_device is not None
        self.swapper.timed_wait(self._copy.make_compute_wait)
        return self._on_device

    def release(self) -> None:
        """Frees the copy of the weights on the device."""
        if self._on_device is not None:
            self._copy.make_compute_wait()
            self._on_device = None

    def write(self, values: torch.Tensor) -> None:
        """Writes `values` to host memory."""
        self._values.copy_(values)

    def full(self) -> torch.Tensor:
        """Returns the weights in host memory."""
        return self._values


class SplitShard:
    """A weight shard with offloaded parts. `resident`: the first elements, which are not offloaded. `shards`: the
    offloaded parts, in order."""

    def __init__(self, resident: torch.Tensor, shards: Sequence[NvmeShard | CpuShard]) -> None:
        self.resident, self.shards = resident, shards

    def prefetch(self) -> None:
        """Starts to fetch the offloaded parts."""
        for shard in self.shards:
            shard.prefetch()

    def storages(self, parts: Sequence[OffloadSplit]) -> list[torch.Tensor | NvmeShard]:
        """Returns, for each of `parts`, the tensor or the `NvmeShard` that stores it."""
        resident = [self.resident[part.start : part.stop] for part in parts if not part.weights_wait]
        return resident + [shard.full() if isinstance(shard, CpuShard) else shard for shard in self.shards]

    def acquire(self) -> list[torch.Tensor]:
        """Fetches all non-empty parts and returns them on the device, in order. The caller must call `release` after
        use."""
        return [part for part in (self.resident, *(shard.acquire() for shard in self.shards)) if len(part)]

    def release(self) -> None:
        """Frees the fetched parts."""
        for shard in self.shards:
            shard.release()

    def bytes(self) -> int:
        """Returns the number of offloaded bytes."""
        return sum(shard.bytes() for shard in self.shards)


def split_shard(
    swapper: StateSwapper, files: bool, values: torch.Tensor, parts: Sequence[OffloadSplit]
) -> SplitShard | None:
    """Divides the weight shard `values` into `parts`, and offloads the parts with `weights_wait`. Returns None if no
    part is offloaded. `files`: whether to offload to files instead of host memory."""
    resident = next((part.start for part in parts if part.weights_wait), len(values))
    if resident == len(values):
        return None
    shard_class = NvmeShard if files else CpuShard
    return SplitShard(
        values[:resident].clone(),
        [shard_class(swapper, values[part.start : part.stop]) for part in parts if part.weights_wait],
    )


class CpuGradBuffer:
    """The gradients of a parameter group's shard, summed in host memory ([Note: added on the host]). After `wait`,
    `values` contains the complete sum."""

    def __init__(self, swapper: StateSwapper, numel: int, dtype: torch.dtype) -> None:
        self.swapper = swapper
        self.values = swapper.backend.host_buffer(numel, dtype).zero_()
        self._adding: tuple[Future[None], torch.Tensor | None] | None = None

    def accumulate(self, gradients: torch.Tensor, first: bool) -> None:
        """Starts to add the gradients of one micro-batch. `first`: whether this micro-batch is the first of a step, so
        that its gradients overwrite the sum of the previous step."""
        self.wait()
        pages = None if first else self.swapper.acquire(self.values.nbytes)
        into = self.values if pages is None else pages[: self.values.nbytes].view(self.values.dtype)
        self.swapper.copy_streams.wait_for_compute()
        copy = self.swapper.copy_streams.copy(into, gradients)
        self._adding = self.swapper.submit(lambda: self._add(copy, gradients, into)), pages

    def _add(self, copy: CopyEvent, gradients: torch.Tensor, into: torch.Tensor) -> None:
        """Waits until `gradients` are copied to `into`, and adds `into` to the sum. Runs in a thread, which references
        `gradients` so that their memory is not freed during the copy."""
        copy.wait()
        if into is not self.values:
            self.values.add_(into)

    def wait(self) -> None:
        """Waits until the last gradients are added."""
        if self._adding is not None:
            (adding, pages), self._adding = self._adding, None
            self.swapper.timed_wait(adding.result)
            if pages is not None:
                self.swapper.release(pages)

    def all_reduce(self, group: CommGroup | None, across: InterHostReducer | None) -> None:
        """Sums the gradients over the ranks of `group`, in a temporary copy on the device. `across`: the reducer that
        compresses the traffic between hosts, or None."""
        if group is None:
            return
        self.wait()
        there = self.values.to(self.swapper.device)
        all_reduce(there, group, inter_host=across).wait()
        self.values.copy_(there)
