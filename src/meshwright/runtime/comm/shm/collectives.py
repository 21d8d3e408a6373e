"""Collectives of CPU ranks on one host, through shared memory. async_collectives.py calls them.

Each rank copies its input to shared memory, or publishes the location of an input that is already in shared memory.
Then each rank reads the inputs of all ranks, and sums or copies them. No messages are sent.

    all-reduce, small     every rank sums all inputs
    all-reduce            rank r sums slice r of all inputs in place, then every rank copies the slices
    reduce-scatter        rank r sums slice r of all inputs
    all-gather            every rank copies all inputs
    all-to-all            rank r copies its rows from all inputs

[Note: fields] A group has at most MAX_INFLIGHT_COLLECTIVES collectives in flight. Collective n uses lane n %
MAX_INFLIGHT_COLLECTIVES. In each lane, each rank has these fields:

    posted     the other ranks can read the rank's input
    reduced    the rank has summed its slice
    done       the rank has read all inputs
    location   the segment and the offset of the rank's input, and related values

A collective starts in its lane once all ranks have set `done` for the lane's previous collective. Collectives start in
the same order on every rank. Each call also runs the steps of earlier collectives that are ready, so that little work
is left when a caller waits for them.

[Note: staging buffers] An input outside of shared memory is copied into a staging buffer, which this rank reuses. If
the caller writes its input directly to a staging buffer (`staging_buffer`), no copy is needed. A buffer is free again
once all ranks have set `done` for its collective. While a rank fills a buffer, the other ranks read at most
MAX_INFLIGHT_BUFFERS of its other buffers. A rank that requests one more buffer first finishes its own steps of the
oldest collective, and then waits for the other ranks. So ranks cannot deadlock.

Guarantees: every rank sums the inputs in order of rank, and 16-bit inputs in float32. So sums are identical on all
ranks and in every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from meshwright.core.errors import MeshwrightError
from meshwright.core.messages import Message
from meshwright.runtime.comm.shm.memory import SharedMemory
from meshwright.runtime.comm.shm.progress import InterHostTransfer, ProgressQueue, StagingBufferPool

MAX_INFLIGHT_COLLECTIVES = 16
(
    FIELD_POSTED,
    FIELD_REDUCED,
    FIELD_DONE,
    _FIELD_SEGMENT,
    _FIELD_FD,
    _FIELD_OFFSET,
    _FIELD_BUFFER,
    _FIELD_SIGNATURE,
    _FIELDS_PER_COLLECTIVE,
) = range(9)
FIELDS_PER_GROUP = MAX_INFLIGHT_COLLECTIVES * _FIELDS_PER_COLLECTIVE
"""Number of fields of a group on each rank. The fields after FIELD_DONE are the `location` in the module docstring.
`_FIELD_BUFFER` is 1 + the index of the staging buffer that contains the input, or 0 for other memory. The other ranks
map a buffer again when its segment changes. `_FIELD_SIGNATURE` encodes the number and dtype of the elements. So ranks
in different collectives raise an error instead of adding unrelated values."""

ONE_SHOT_MAX_BYTES = 1 << 16
"""Maximum number of bytes of a one-shot all-reduce, in which every rank sums the full inputs. For small inputs this is
cheaper than the second synchronisation of an all-reduce in which each rank sums one slice."""

REDUCE_TILE_ELEMENTS = 1 << 16
"""Number of elements that are summed at a time, so that the sum stays in the cache."""

_DTYPE_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
)
_HALF_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


class InterHostReducer(Protocol):
    """Reduces compressed gradients between hosts (compression.py), not between ranks of one host. `group` is a
    `CommGroup` (typed as Any, because group.py imports this module). `later` is a second group of the same ranks, for
    messages that depend on earlier messages of the reduction."""

    def all_reduce(self, flat: torch.Tensor, group: Any, later: Any) -> InterHostTransfer:
        """Starts the in-place sum of `flat` over `group`. Returns the transfer."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, group: Any, later: Any) -> InterHostTransfer:
        """Starts the sum of `full` over `group` and writes this rank's slice of the sum to `out`. Returns the
        transfer."""


class ShmCollectives:
    """The collectives of `ranks`, which include this rank. They use `FIELDS_PER_GROUP` shared-memory fields, starting
    at index `first`."""

    def __init__(self, host: SharedMemory, ranks: Sequence[int], first: int) -> None:
        self.host, self.ranks, self.first_field = host, tuple(ranks), first
        self.index = self.ranks.index(host.rank)
        self.inter_host_groups: tuple[Any, ...] = ()
        self.peers = [rank for rank in self.ranks if rank != host.rank]
        self._peer_segments: dict[tuple[int, int], int] = {}
        self._number = 0
        own = weakref.ref(self)  # a reference cycle would delay the release of the memory
        self.progress_queue = ProgressQueue(
            lambda number, field: _dereference(own)._all_reached(number, field),
            lambda number, field: _dereference(own)._wait_for_all(number, field),
        )
        self.buffers = StagingBufferPool(
            host,
            self.progress_queue,
            lambda number: _dereference(own)._all_reached(number, FIELD_DONE),
            lambda number: _dereference(own)._wait_for_all(number, FIELD_DONE),
        )
        self.close = weakref.finalize(self, _wait_for_readers, host, self.peers, first, self.progress_queue.finished)

    # --- collectives: each method returns the function that finishes the collective

    def all_reduce(
        self, flat: torch.Tensor, use_max: bool = False, inter_host: InterHostReducer | None = None
    ) -> Callable[[], None]:
        """Starts the in-place sum (or maximum) of `flat`. Returns the function that finishes the collective.
        `inter_host` is not used on one host."""
        small = flat.numel() * flat.element_size() <= ONE_SHOT_MAX_BYTES
        number, memory = self.begin(flat, copy=small)

        def sum_all() -> None:
            reduce_inputs(self.inputs(number, memory), slice(None), flat, use_max)
            self.mark_read(number)

        def sum_own() -> None:
            own = rank_slice(flat, self.index, len(self.ranks))
            reduce_inputs(self.inputs(number, memory), own, memory[own], use_max)
            self.host.set_field(self.field_index(number, FIELD_REDUCED), number)

        if small:
            return self.progress_queue.add(number, (FIELD_POSTED, sum_all))
        return self.progress_queue.add(
            number, (FIELD_POSTED, sum_own), (FIELD_REDUCED, lambda: copy_reduced_slices(self, number, memory, flat))
        )

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        inter_host: InterHostReducer | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        """Starts to sum `full` over the ranks. This rank's slice of the sum goes to `out`. Returns the function that
        finishes the collective. `sizes`: the number of elements of each rank's slice, if unequal."""
        number, memory = self.begin(full)
        first = sum(sizes[: self.index]) if sizes is not None else 0
        own = (
            rank_slice(memory, self.index, len(self.ranks))
            if sizes is None
            else slice(first, first + sizes[self.index])
        )

        def scatter() -> None:
            reduce_inputs(self.inputs(number, memory), own, out)
            self.mark_read(number)

        return self.progress_queue.add(number, (FIELD_POSTED, scatter))

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> Callable[[], None]:
        """Starts the all-gather of all shards into `full`. Returns the function that finishes the collective. `sizes`:
        the number of elements of each rank's shard, if unequal."""
        number, memory = self.begin(shard)
        each = [shard.numel()] * len(self.ranks) if sizes is None else list(sizes)

        def gather() -> None:
            for into, part in zip(full.split(each), self.inputs(number, memory, each), strict=True):
                if into.data_ptr() != part.data_ptr():
                    into.copy_(part)
            self.mark_read(number)

        return self.progress_queue.add(number, (FIELD_POSTED, gather))

    def all_to_all_rows(
        self, out: torch.Tensor, sent: torch.Tensor, rows: Sequence[Sequence[int]]
    ) -> Callable[[], None]:
        """Starts the all-to-all: rank i sends `rows[i][j]` rows to rank j. Returns the function that finishes the
        collective."""
        number, memory = self.begin(sent)
        width, numels = sent.shape[1], [sum(row) * sent.shape[1] for row in rows]

        def exchange() -> None:
            index = 0
            for row, part in zip(rows, self.inputs(number, memory, numels), strict=True):
                offset, numel = sum(row[: self.index]) * width, row[self.index] * width
                out.view(-1)[index : index + numel].copy_(part[offset : offset + numel])
                index += numel
            self.mark_read(number)

        return self.progress_queue.add(number, (FIELD_POSTED, exchange))

    def staging_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns uninitialised memory that the other ranks can read. The caller fills the memory and passes it to one
        collective."""
        return self.buffers.acquire(numel * dtype.itemsize).bytes[: numel * dtype.itemsize].view(dtype)

    def ordered_staging_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a staging buffer for data that arrive slowly, such as gradients during backward. All ranks request
        these buffers in the same order ([Note: in turn] in progress.py)."""
        return self.buffers.acquire_ordered(numel * dtype.itemsize).bytes[: numel * dtype.itemsize].view(dtype)

    def quiesce(self) -> None:
        """Waits until no rank reads this rank's memory. No collective may be in flight."""
        assert not self.progress_queue.pending, "collectives are under way"
        for number in range(max(self._number - MAX_INFLIGHT_COLLECTIVES, 0) + 1, self._number + 1):
            self._wait_for_all(number, FIELD_DONE)
        self.buffers.reset_order()

    # --- steps of one collective

    def begin(self, part: torch.Tensor, copy: bool = False) -> tuple[int, torch.Tensor]:
        """Starts a collective with this rank's input `part`. Returns the number of the collective, and the tensor that
        the other ranks read: `part` itself, or a copy in a staging buffer. `copy`: whether to copy in every case."""
        number = self.next_number()
        return number, self.post(number, part, copy)

    def next_number(self) -> int:
        """Returns the number of the next collective. Waits until its lane is free."""
        self.progress_queue.progress()
        if len(self.progress_queue.pending) == MAX_INFLIGHT_COLLECTIVES:
            self.progress_queue.finish(self.progress_queue.pending[0].number)
        if self._number >= MAX_INFLIGHT_COLLECTIVES:
            self._wait_for_all(self._number + 1 - MAX_INFLIGHT_COLLECTIVES, FIELD_DONE)
        self._number += 1
        return self._number

    def post(self, number: int, part: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """Publishes this rank's input `part` for collective `number`. Returns the tensor that the other ranks read:
        `part` itself, or a copy in a staging buffer."""
        location = None if copy else self.host.locate(part)
        memory = part
        if location is None:
            memory = self.staging_buffer(part.numel(), part.dtype)
            memory.copy_(part.reshape(-1))
            location = self.host.locate(memory)
            assert location is not None
        segment, offset = location
        fields, index = self.host.fields[self.host.rank], self.field_index(number, 0)
        fields[index + _FIELD_SEGMENT], fields[index + _FIELD_FD], fields[index + _FIELD_OFFSET] = (
            segment.number,
            segment.fd,
            offset,
        )
        fields[index + _FIELD_BUFFER], fields[index + _FIELD_SIGNATURE] = (
            self.buffers.mark_filled(segment, number),
            _input_signature(memory.numel(), memory.dtype),
        )
        self.host.set_field(index + FIELD_POSTED, number)
        return memory

    def inputs(self, number: int, own: torch.Tensor, numels: Sequence[int] = ()) -> list[torch.Tensor]:
        """Returns the inputs of all ranks as flat tensors, in order of rank. All inputs must be posted. `numels`: the
        number of elements of each rank's input, if unequal.

        Raises:
            MeshwrightError: another rank's input has a different number of elements or dtype.
        """
        own = own.view(-1)
        parts = []
        for rank, numel in zip(self.ranks, numels or [own.numel()] * len(self.ranks), strict=True):
            if rank == self.host.rank:
                parts.append(own)
                continue
            index = self.field_index(number, 0)
            segment, fd, offset, buffer, signature = self.host.fields[rank][
                index + _FIELD_SEGMENT : index + _FIELDS_PER_COLLECTIVE
            ]
            if signature != _input_signature(numel, own.dtype):
                self._raise_mismatch(number, rank, signature, _input_signature(numel, own.dtype))
            if buffer:
                previous = self._peer_segments.get((rank, buffer))
                if previous != segment:
                    self._peer_segments[rank, buffer] = segment
                    self.host.unmap(rank, previous)
            parts.append(
                self.host.map_segment(rank, segment, fd)[offset : offset + numel * own.element_size()].view(own.dtype)
            )
        return parts

    def _raise_mismatch(self, number: int, rank: int, signature: int, expected: int) -> None:
        actual_text, expected_text = (
            f"{each // len(_DTYPE_NAMES)} elements of {_DTYPE_NAMES[each % len(_DTYPE_NAMES)]}"
            for each in (signature, expected)
        )
        raise MeshwrightError(
            Message(
                "rank {rank} and rank {peer} are not in the same collective: collective {number} of ranks {ranks} "
                "has {actual_text} on rank {peer}, but {expected_text} on rank {rank}",
                rank=self.host.rank,
                peer=rank,
                number=number,
                ranks=", ".join(map(str, self.ranks)),
                actual_text=actual_text,
                expected_text=expected_text,
            )
        )

    def _wait_for_all(self, number: int, field: int) -> None:
        for rank in self.peers:
            self.host.wait_for_field(rank, self.field_index(number, field), number)

    def _all_reached(self, number: int, field: int) -> bool:
        """Returns whether all other ranks have set `field` for collective `number`, or for a later collective in the
        same lane."""
        index = self.field_index(number, field)
        return all(self.host.fields[rank][index] >= number for rank in self.peers)

    def mark_read(self, number: int) -> None:
        """Publishes that this rank has read the inputs of all other ranks."""
        self.host.set_field(self.field_index(number, FIELD_DONE), number)

    def field_index(self, number: int, field: int) -> int:
        """Returns the index of `field` of collective `number` among the fields of a rank."""
        return _field_index(self.first_field, number, field)


def copy_reduced_slices(collectives: ShmCollectives, number: int, memory: torch.Tensor, flat: torch.Tensor) -> None:
    """Copies the reduced slices of all ranks to `flat`. This rank's slice is in `memory`."""
    for rank, part in enumerate(collectives.inputs(number, memory)):
        if rank != collectives.index or memory.data_ptr() != flat.data_ptr():
            own = rank_slice(flat, rank, len(collectives.ranks))
            flat[own].copy_(part[own])
    collectives.mark_read(number)


def _dereference(reference: weakref.ref[ShmCollectives]) -> ShmCollectives:
    collectives = reference()
    assert collectives is not None, "a collective outlives its group"
    return collectives


def _field_index(first: int, number: int, field: int) -> int:
    return first + number % MAX_INFLIGHT_COLLECTIVES * _FIELDS_PER_COLLECTIVE + field


def _input_signature(numel: int, dtype: torch.dtype) -> int:
    """Returns one integer that encodes the number and the dtype of the elements."""
    return numel * len(_DTYPE_NAMES) + _DTYPE_NAMES.index(str(dtype).removeprefix("torch."))


def rank_slice(flat: torch.Tensor, rank: int, ranks: int) -> slice:
    """Returns the slice of `flat` that the rank at index `rank` of `ranks` ranks reduces."""
    length = flat.numel()
    return slice(length * rank // ranks, length * (rank + 1) // ranks)


def _wait_for_readers(host: SharedMemory, peers: Sequence[int], first: int, finished: list[int]) -> None:
    """Waits until the other ranks have read this rank's inputs, so that this rank's memory can be freed. Ignores ranks
    that have ended, and stops waiting after SHUTDOWN_TIMEOUT_SECONDS."""
    last = range(max(finished[0] - MAX_INFLIGHT_COLLECTIVES, 0) + 1, finished[0] + 1)
    host.drain((rank, _field_index(first, number, FIELD_DONE), number) for number in last for rank in peers)


def reduce_inputs(parts: list[torch.Tensor], elements: slice, out: torch.Tensor, use_max: bool = False) -> None:
    """Writes the sum (or the maximum) of `parts[...][elements]` to `out`, in order of rank. `out` may be one of the
    parts."""
    rows = [part[elements].split(REDUCE_TILE_ELEMENTS) for part in parts]
    for into, first, *rest in zip(out.split(REDUCE_TILE_ELEMENTS), *rows, strict=True):
        if use_max:
            total = first.clone()
            for row in rest:
                torch.maximum(total, row, out=total)
            into.copy_(total)
            continue
        total = first.float() if first.dtype in _HALF_PRECISION_DTYPES else first
        for row in rest[:-1]:
            total = total + row
        torch.add(total, rest[-1], out=into)
