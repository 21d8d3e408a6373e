"""Collectives of the ranks of one host, through shared memory.

Each rank writes its part where the others can read it, or says where it lies already, and sums or copies out of theirs:
nothing is sent.
Sums go in order of rank on every rank, low precision in float32, so that they are the same everywhere and in every run.

    all-reduce, small     every rank sums all parts
    all-reduce            rank r sums slice r of all parts in its own, then everyone copies the slices
    reduce-scatter        rank r sums slice r of all parts
    all-gather            everyone copies all parts
    all-to-all            rank r copies what is for it out of all parts

[Note: lanes] A group has LANES collectives under way at most. Collective n uses lane n % LANES, whose words are:
`posted` (n: the part
can be read), `halfway` (n: the own slice is summed), `done` (n: the others' parts are read), and where the part lies.
The next collective
of a lane begins when everyone is done with this one. Collectives begin in the same order on every rank; what can be
done without waiting is
done whenever another one begins, so that little is left to do, and to wait for, at the end.

[Note: slots] What does not lie in shared memory is copied into a slot, memory that this rank keeps for it; who can fill
a slot itself
(`stage`) saves the copy. A slot is free again when everyone is done with its collective. Collectives under way keep
UNDER_WAY at most, which
is also what ZeRO 2 and 3 hold of whole gradients (slots.py): whoever asks for another one then waits for the oldest,
which every rank that came as far
as this one has finished, so that nobody waits in a circle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from meshwright.core.errors import MeshwrightError
from meshwright.runtime.comm.shm.memory import SharedMemory
from meshwright.runtime.comm.shm.progress import InterHostTransfer, ProgressQueue, StagingBufferPool

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup

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
"""`_SLOT`: 1 + the number of the slot that the part lies in, whose memory another one follows when it grows; 0 for
other memory. `_FIELD_SIGNATURE`: how many elements of which type, so that ranks that are not
in the same collective are told so instead of adding up what does not belong together."""

ONE_SHOT_MAX_BYTES = 1 << 16
"""Bytes up to which every rank sums everything: reading is cheaper than meeting twice."""

REDUCE_TILE_ELEMENTS = 1 << 16
"""Elements that are summed at a time, so that the sum stays in the cache."""

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
    """How sums go between hosts, where not plainly (compression.py). Ranks of one host send nothing. `later`: the same
    ranks, for a second
    message that waits for a first."""

    def all_reduce(self, flat: torch.Tensor, group: CommGroup, later: CommGroup) -> InterHostTransfer: ...

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, group: CommGroup, later: CommGroup
    ) -> InterHostTransfer: ...


class ShmCollectives:
    """The collectives of the ranks `ranks` (this one among them), who speak through their words from `first` on."""

    def __init__(self, host: SharedMemory, ranks: Sequence[int], first: int) -> None:
        self.host, self.ranks, self.first_field = host, tuple(ranks), first
        self.index = self.ranks.index(host.rank)
        self.inter_host_groups: tuple[CommGroup, ...] = ()
        self.peers = [rank for rank in self.ranks if rank != host.rank]
        self._peer_segments: dict[tuple[int, int], int] = {}
        self._number = 0
        own = weakref.ref(self)  # no cycle: memory goes when the last one lets go
        self.progress_queue = ProgressQueue(
            lambda number, word: _dereference(own)._all_reached(number, word),
            lambda number, word: _dereference(own)._wait_for_all(number, word),
        )
        self.buffers = StagingBufferPool(
            host,
            self.progress_queue,
            lambda number: _dereference(own)._all_reached(number, FIELD_DONE),
            lambda number: _dereference(own)._wait_for_all(number, FIELD_DONE),
        )
        self.close = weakref.finalize(self, _wait_for_readers, host, self.peers, first, self.progress_queue.finished)

    # --- collectives: each returns what finishes it
    # -----------------------------------------------------------------------------

    def all_reduce(
        self, flat: torch.Tensor, use_max: bool = False, inter_host: InterHostReducer | None = None
    ) -> Callable[[], None]:
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
        """`sizes`: elements of each rank's slice, where they are unequal."""
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
        """Uneven: rank i sends `rows[i][j]` rows to rank j."""
        number, memory = self.begin(sent)
        width, numels = sent.shape[1], [sum(row) * sent.shape[1] for row in rows]

        def exchange() -> None:
            at = 0
            for row, part in zip(rows, self.inputs(number, memory, numels), strict=True):
                start, numel = sum(row[: self.index]) * width, row[self.index] * width
                out.view(-1)[at : at + numel].copy_(part[start : start + numel])
                at += numel
            self.mark_read(number)

        return self.progress_queue.add(number, (FIELD_POSTED, exchange))

    def staging_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the others can read, to be filled with anything and given to a collective once. What was in it is
        still there."""
        return self.buffers.acquire(numel * dtype.itemsize).bytes[: numel * dtype.itemsize].view(dtype)

    def ordered_staging_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for what is filled little by little, and asked for in the same order on every rank ([Note: in turn]
        of slots.py)."""
        return self.buffers.acquire_ordered(numel * dtype.itemsize).bytes[: numel * dtype.itemsize].view(dtype)

    def quiesce(self) -> None:
        """Wait until nobody reads this rank's memory any more; nothing may be under way."""
        assert not self.progress_queue.pending, "collectives are under way"
        for number in range(max(self._number - MAX_INFLIGHT_COLLECTIVES, 0) + 1, self._number + 1):
            self._wait_for_all(number, FIELD_DONE)
        self.buffers.reset_order()

    # --- one collective
    # ---------------------------------------------------------------------------------------------------------

    def begin(self, part: torch.Tensor, copy: bool = False) -> tuple[int, torch.Tensor]:
        """Its number, and this rank's part where the others read it: where it is, or in a slot."""
        number = self.next_number()
        return number, self.post(number, part, copy)

    def next_number(self) -> int:
        """Of the next collective, which has room in its lane."""
        self.progress_queue.progress()
        if len(self.progress_queue.pending) == MAX_INFLIGHT_COLLECTIVES:
            self.progress_queue.finish(self.progress_queue.pending[0].number)
        if self._number >= MAX_INFLIGHT_COLLECTIVES:
            self._wait_for_all(self._number + 1 - MAX_INFLIGHT_COLLECTIVES, FIELD_DONE)
        self._number += 1
        return self._number

    def post(self, number: int, part: torch.Tensor, copy: bool = False) -> torch.Tensor:
        """This rank's part, where the others read it from now on."""
        place = None if copy else self.host.locate(part)
        memory = part
        if place is None:
            memory = self.staging_buffer(part.numel(), part.dtype)
            memory.copy_(part.reshape(-1))
            place = self.host.locate(memory)
            assert place is not None
        segment, offset = place
        words, at = self.host.fields[self.host.rank], self.field_index(number, 0)
        words[at + _FIELD_SEGMENT], words[at + _FIELD_FD], words[at + _FIELD_OFFSET] = (
            segment.number,
            segment.fd,
            offset,
        )
        words[at + _FIELD_BUFFER], words[at + _FIELD_SIGNATURE] = (
            self.buffers.mark_filled(segment, number),
            _input_signature(memory.numel(), memory.dtype),
        )
        self.host.set_field(at + FIELD_POSTED, number)
        return memory

    def inputs(self, number: int, own: torch.Tensor, numels: Sequence[int] = ()) -> list[torch.Tensor]:
        """Every rank's part, this one's among them, once they are there; of `numels` elements where they differ."""
        own = own.view(-1)
        parts = []
        for rank, numel in zip(self.ranks, numels or [own.numel()] * len(self.ranks), strict=True):
            if rank == self.host.rank:
                parts.append(own)
                continue
            at = self.field_index(number, 0)
            segment, file, start, slot, what = self.host.fields[rank][at + _FIELD_SEGMENT : at + _FIELDS_PER_COLLECTIVE]
            if what != _input_signature(numel, own.dtype):
                self._raise_mismatch(number, rank, what, _input_signature(numel, own.dtype))
            if slot:
                before = self._peer_segments.get((rank, slot))
                if before != segment:
                    self._peer_segments[rank, slot] = segment
                    self.host.unmap(rank, before)
            parts.append(
                self.host.map_segment(rank, segment, file)[start : start + numel * own.element_size()].view(own.dtype)
            )
        return parts

    def _raise_mismatch(self, number: int, rank: int, what: int, expected: int) -> None:
        theirs, ours = (
            f"{each // len(_DTYPE_NAMES)} elements of {_DTYPE_NAMES[each % len(_DTYPE_NAMES)]}"
            for each in (what, expected)
        )
        raise MeshwrightError(
            f"rank {self.host.rank} and rank {rank} are not in the same collective: their {number}th of ranks "
            f"{', '.join(map(str, self.ranks))} is of {theirs} on rank {rank}, rank {self.host.rank} expects {ours}"
        )

    def _wait_for_all(self, number: int, word: int) -> None:
        for rank in self.peers:
            self.host.wait_for_field(rank, self.field_index(number, word), number)

    def _all_reached(self, number: int, word: int) -> bool:
        """Whether everyone has said it, of this collective or a later one of its lane."""
        at = self.field_index(number, word)
        return all(self.host.fields[rank][at] >= number for rank in self.peers)

    def mark_read(self, number: int) -> None:
        """This rank has read what it needs of the others' parts."""
        self.host.set_field(self.field_index(number, FIELD_DONE), number)

    def field_index(self, number: int, word: int) -> int:
        return _field_index(self.first_field, number, word)


def copy_reduced_slices(lanes: ShmCollectives, number: int, memory: torch.Tensor, flat: torch.Tensor) -> None:
    """All slices that were summed, this rank's in `memory`, come to `flat`."""
    for rank, part in enumerate(lanes.inputs(number, memory)):
        if rank != lanes.index or memory.data_ptr() != flat.data_ptr():
            taken = rank_slice(flat, rank, len(lanes.ranks))
            flat[taken].copy_(part[taken])
    lanes.mark_read(number)


def _dereference(lanes: weakref.ref[ShmCollectives]) -> ShmCollectives:
    found = lanes()
    assert found is not None, "a collective outlives its group"
    return found


def _field_index(first: int, number: int, word: int) -> int:
    return first + number % MAX_INFLIGHT_COLLECTIVES * _FIELDS_PER_COLLECTIVE + word


def _input_signature(numel: int, dtype: torch.dtype) -> int:
    """One word for a part."""
    return numel * len(_DTYPE_NAMES) + _DTYPE_NAMES.index(str(dtype).removeprefix("torch."))


def rank_slice(flat: torch.Tensor, rank: int, ranks: int) -> slice:
    length = flat.numel()
    return slice(length * rank // ranks, length * (rank + 1) // ranks)


def _wait_for_readers(host: SharedMemory, others: Sequence[int], first: int, finished: list[int]) -> None:
    """Before this rank's memory goes: the others have read all that they need. Who is gone, or late beyond reason,
    needs it no more."""
    last = range(max(finished[0] - MAX_INFLIGHT_COLLECTIVES, 0) + 1, finished[0] + 1)
    host.drain((rank, _field_index(first, number, FIELD_DONE), number) for number in last for rank in others)


def reduce_inputs(parts: list[torch.Tensor], taken: slice, out: torch.Tensor, use_max: bool = False) -> None:
    """`out` becomes the sum of `parts[...][taken]`, or their maximum, in order; it may be one of them."""
    rows = [part[taken].split(REDUCE_TILE_ELEMENTS) for part in parts]
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
