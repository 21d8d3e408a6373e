"""Gathers full weights, gradients and buffers of a sharded model on rank 0, a few at a time. In a numerical proof
(train/proof/), rank 0 uses them to compute a small batch as on one device, and to compare the gradients.

To gather a full tensor, each rank fills a buffer with its local pieces of the tensor (state_dict.py), and with zeros
everywhere else. An all-reduce sums these buffers. For each element only one rank contributes a value other than the
zero fill, so the sum is exact. No rank needs to know the layout of another rank. The tensors of a request pass in order
through one bucket of BUCKET_BYTES on every rank. Only rank 0 stores full tensors.

[Note: requests] The other ranks cannot know in advance in which order the code on rank 0 uses modules. So rank 0 sends
each request to them: the kind of tensors, the length of the request, and the index and element range of each tensor.
The other ranks answer in `serve` until rank 0 calls `end`. A rank that cannot supply its pieces sets the last element
of the bucket. The request then fails on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.state_dict import BUFFER_PREFIX, REPLICA_PREFIX, LocalPiece, buffer_pieces, selected_pieces
from meshwright.spec.layout import ShardMetadata

BUCKET_BYTES = 1 << 22
"""Maximum number of bytes of one all-reduce."""
REQUEST_WEIGHTS, REQUEST_GRADIENTS, REQUEST_BUFFERS, REQUEST_END = range(4)
"""The kinds of requests."""
HEADER_LENGTH = 2
"""Number of integers that precede each request: its kind and its length."""
TensorSink = Callable[[str, int, torch.Tensor], None]
"""A function that receives a tensor name, an offset into the flattened full tensor, and the elements from this offset
on. The elements are valid only during the call."""


class ElementRange(NamedTuple):
    """Elements [start, stop) of the flattened full tensor `name`."""

    name: str
    start: int
    stop: int


@contextmanager
def without_torch_modes() -> Iterator[None]:
    """Disables torch's dispatch and function modes in this thread. They are meant for the operations of a model, and
    would take more time than the small operations inside the context."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class GatherService:
    """Sends the requests of rank 0, and answers them on all ranks.

    `names`: all parameters, in the model's order. `buffers`: the buffers of the state dict. `compute`: the dtype in
    which the plan computes.
    """

    def __init__(self, engine: Engine, compute: torch.dtype) -> None:
        self.engine, self.compute = engine, compute
        self.names = tuple(engine.shapes)
        self.buffers = tuple(engine.shards.buffers)
        self.bytes = 0
        """Number of bytes of full tensors that rank 0 has requested."""
        self._bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=engine.mesh.device)

    # --- requests by rank 0

    def weights(self, names: Sequence[str], kind: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns full weights by name, in dtype `kind`. Their values are those of the main weights, rounded to the
        compute dtype as after an update."""
        return self._stored(REQUEST_WEIGHTS, names, kind)

    def weight_range(self, wanted: ElementRange, kind: torch.dtype) -> torch.Tensor:
        """Returns the elements `wanted` of a flattened weight, rounded as in `weights`, in dtype `kind`."""
        found = torch.empty(wanted.stop - wanted.start, dtype=kind, device=self.engine.mesh.device)

        def take(name: str, start: int, part: torch.Tensor) -> None:
            found[start - wanted.start : start - wanted.start + len(part)] = part

        self._request(REQUEST_WEIGHTS, [wanted], take)
        return found

    def gradients(self, names: Sequence[str], take: TensorSink) -> None:
        """Passes the full gradients of the last backward to `take`. The gradients include the loss scale."""
        self._request(REQUEST_GRADIENTS, self._whole(REQUEST_GRADIENTS, names), take)

    def gradient_range(self, wanted: ElementRange, take: TensorSink) -> None:
        """Passes the elements `wanted` of a flattened gradient to `take`, scaled as in `gradients`."""
        self._request(REQUEST_GRADIENTS, [wanted], take)

    def live_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of the state dict by name, from the first replica, converted to float64."""
        return self._stored(REQUEST_BUFFERS, self.buffers, torch.float64)

    def end(self) -> None:
        """Makes the other ranks return from `serve`."""
        self._send([REQUEST_END, 0])

    def _stored(self, what: int, names: Sequence[str], kind: torch.dtype) -> dict[str, torch.Tensor]:
        shapes = self._shapes(what)
        found = {name: torch.empty(shapes[name], dtype=kind, device=self.engine.mesh.device) for name in names}

        def take(name: str, start: int, part: torch.Tensor) -> None:
            found[name].view(-1)[start : start + len(part)] = part

        self._request(what, self._whole(what, names), take)
        return found

    def _whole(self, what: int, names: Sequence[str]) -> list[ElementRange]:
        shapes = self._shapes(what)
        return [ElementRange(name, 0, shapes[name].numel()) for name in names]

    def _request(self, what: int, ranges: Sequence[ElementRange], take: TensorSink) -> None:
        if not ranges:
            return
        known = {name: at for at, name in enumerate(self.buffers if what == REQUEST_BUFFERS else self.names)}
        wanted = [number for each in ranges for number in (known[each.name], each.start, each.stop)]
        with without_torch_modes():
            self._send([what, len(wanted)])  # from here on, a failure on one rank raises on all ranks
            self._send(wanted)
            self._answer(what, ranges, take)
        self.bytes += sum(each.stop - each.start for each in ranges) * self._type(what).itemsize

    def _send(self, numbers: list[int]) -> list[int]:
        """Sends `numbers` from rank 0 to every rank. Returns them on every rank. The other ranks pass zeros."""
        message = torch.tensor(numbers, dtype=torch.float64, device=self.engine.mesh.device)
        all_reduce(message, self.engine.mesh.world).wait()
        return [int(number) for number in message.tolist()]

    # --- answers of the other ranks

    def serve(self) -> None:
        """Answers requests of rank 0 until rank 0 calls `end`. If a request fails, rank 0 reports the error."""
        with without_torch_modes():
            while True:
                what, count = self._send([0] * HEADER_LENGTH)
                if what == REQUEST_END:
                    return
                known = self.buffers if what == REQUEST_BUFFERS else self.names
                with suppress(InputError):
                    wanted = iter(self._send([0] * count))
                    self._answer(
                        what,
                        [ElementRange(known[at], *where) for at, *where in zip(wanted, wanted, wanted, strict=True)],
                        None,
                    )

    # --- all ranks

    def _answer(self, what: int, ranges: Sequence[ElementRange], take: TensorSink | None) -> None:
        """Gathers `ranges` of the tensors of the kind `what`, and passes the elements to `take` on rank 0. All ranks
        call it.

        Raises:
            InputError: a rank cannot supply its pieces. Every rank raises it.
        """
        kind, failure = self._type(what), ""
        longest = BUCKET_BYTES // kind.itemsize - 1
        parts: list[LocalPiece] | None = None
        for window in split_into_buckets([each.stop - each.start for each in ranges], longest):
            bucket = self._bucket[: (window.size + 1) * kind.itemsize].view(kind).zero_()
            try:
                parts = list(self._local_pieces(what, {each.name for each in ranges})) if parts is None else parts
                self._fill(bucket, window, ranges, parts)
            except Exception as error:
                failure = failure or reason_of(error)
            if failure:
                bucket.zero_()[-1] = 1.0
            all_reduce(bucket, self.engine.mesh.world).wait()
            self.engine.mesh.error_propagator.report_alive()
            if failed := int(bucket[-1]):
                said = f": {failure}" if failure else ""
                raise InputError(
                    Message(
                        "{failed} of {world} ranks failed to send their shards of {ranges}{reason}",
                        failed=failed,
                        world=self.engine.mesh.plan.world,
                        ranges=ranges[window.spans[0].tensor].name,
                        reason=said,
                    )
                )
            at = 0
            for index, start, stop in window.spans:
                if take is not None:
                    take(ranges[index].name, ranges[index].start + start, bucket[at : at + stop - start])
                at += stop - start

    def _fill(
        self, bucket: torch.Tensor, window: GatherBucket, ranges: Sequence[ElementRange], parts: Sequence[LocalPiece]
    ) -> None:
        at = 0
        for index, start, stop in window.spans:
            for stored in parts:
                if stored.piece.name.partition("/")[2] == ranges[index].name:
                    write_piece(
                        bucket[at : at + stop - start],
                        ranges[index].start + start,
                        stored.piece,
                        stored.data.detach().view(-1),
                    )
            at += stop - start

    def _shapes(self, what: int) -> Mapping[str, torch.Size]:
        return self.engine.shards.buffer_shapes if what == REQUEST_BUFFERS else self.engine.shapes

    def _type(self, what: int) -> torch.dtype:
        """Returns the dtype in which tensors of the kind `what` are sent. It does not depend on what a rank stores, so
        it is the same on all ranks."""
        if what == REQUEST_BUFFERS:
            return torch.float64
        if what == REQUEST_WEIGHTS:
            return self.compute
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def _local_pieces(self, what: int, names: set[str]) -> Iterator[LocalPiece]:
        engine = self.engine
        if what != REQUEST_BUFFERS:
            kind = "model" if what == REQUEST_WEIGHTS else "gradient"
            return (
                stored
                for stored in selected_pieces(engine, kind, names)
                if not stored.piece.name.startswith(REPLICA_PREFIX)
            )
        place = engine.mesh.coords
        first = engine.mesh.replica == 0 and place.cp == 0
        return (
            stored
            for stored in buffer_pieces(engine, saving=True)
            if first
            and stored.piece.name.removeprefix(BUFFER_PREFIX) in names
            and (stored.piece.split is not None or place.tp == 0)
        )


class BucketSpan(NamedTuple):
    """Elements [start, stop) of one element range of a request. `tensor` is the index of the range in the request."""

    tensor: int
    start: int
    stop: int


class GatherBucket(NamedTuple):
    """The contents of one all-reduce: `spans` in order, `size` elements in total."""

    spans: tuple[BucketSpan, ...]
    size: int


def split_into_buckets(sizes: Sequence[int], longest: int) -> Iterator[GatherBucket]:
    """Yields the buckets for tensors of `sizes` elements in order, with at most `longest` elements per bucket.

    >>> [window.size for window in split_into_buckets([3, 0, 4], 5)]
    [5, 2]
    """
    spans: list[BucketSpan] = []
    free = longest
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free)
            spans.append(BucketSpan(index, start, stop))
            free -= stop - start
            start = stop
            if not free:
                yield GatherBucket(tuple(spans), longest)
                spans, free = [], longest
    if spans:
        yield GatherBucket(tuple(spans), longest - free)


def write_piece(window: torch.Tensor, first: int, piece: ShardMetadata, data: torch.Tensor) -> None:
    """Copies those elements of `piece` to `window` that `window` covers. `data` is the local data of the piece.
    `window` is a range of the flattened full tensor that begins at element `first`."""
    begin = max(piece.start, _local_offset(first, piece))
    end = min(piece.stop, _local_offset(first + window.numel(), piece))
    if begin >= end:
        return
    part = data[begin - piece.start : end - piece.start].to(window)
    if piece.split is None:
        window[begin - first : end - first] = part
    else:
        window[full_indices(torch.arange(begin, end, device=window.device), piece) - first] = part


def _local_offset(at: int, piece: ShardMetadata) -> int:
    """Returns the offset in the local tensor that corresponds to element `at` of the flattened full tensor. If this
    rank does not store the element, returns the offset of the next stored element."""
    if piece.split is None:
        return at
    inner = math.prod(piece.shape[piece.split + 1 :])
    outer, rest = divmod(at, piece.shape[piece.split] * inner)
    row, within = divmod(rest, inner)
    rows = sum(min(max(row - start, 0), stop - start) for start, stop in piece.intervals)
    within = within if any(start <= row < stop for start, stop in piece.intervals) else 0
    return (outer * sum(stop - start for start, stop in piece.intervals) + rows) * inner + within


def full_indices(index: torch.Tensor, piece: ShardMetadata) -> torch.Tensor:
    """Converts indices in the flattened local tensor to indices in the flattened full tensor."""
    if piece.split is None:
        return index
    inner = math.prod(piece.shape[piece.split + 1 :])
    rows = torch.cat([torch.arange(start, stop, device=index.device) for start, stop in piece.intervals])
    outer, rest = index // (len(rows) * inner), index % (len(rows) * inner)
    return (outer * piece.shape[piece.split] + rows[rest // inner]) * inner + rest % inner
