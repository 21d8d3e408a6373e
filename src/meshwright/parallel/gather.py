"""Whole weights and gradients of a sharded run, a few at a time, on every rank.

A whole tensor is the sum over all ranks of tensors that are zero but for the pieces that each rank stores (state.py). Every element is stored by one
rank of those that count, so the sum is exact, and no rank needs to know the layout of another. The traffic is one all-reduce of raw tensors for each request.

[Note: requests] Rank 0 runs code whose order of modules no other rank can foresee. It sends a header (what, how many, which names) before each
request; the other ranks answer in `serve` until rank 0 ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.parallel.engine import Parallel
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.state import BUFFER, REPLICA, Held, buffer_pieces, pieces_of
from meshwright.spec.piece import Piece

BUCKET_ELEMENTS = 1 << 25
"""Elements that one all-reduce carries at least, unless the request has fewer."""
WEIGHTS, GRADIENTS, BUFFERS, END = range(4)
HEADER = 2


class WholeTensors:
    """Answers requests of rank 0. `names`: all parameters, in the order of the model; `buffers`: those of the saved state."""

    def __init__(self, engine: Parallel, compute: torch.dtype) -> None:
        self.engine, self.compute = engine, compute
        self.names = tuple(engine.shapes)
        self.buffers = tuple(engine.beside.buffers)
        self.bytes = 0
        """Of whole tensors that rank 0 has requested."""

    # --- rank 0 ---------------------------------------------------------------------------------------------------------------

    def weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole weights in the compute type, rounded from the main weights as the update rounds them."""
        return self._request(WEIGHTS, names)

    def gradients(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole gradients as the last backward left them, times the loss scale."""
        return self._request(GRADIENTS, names)

    def live_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the saved state as the first replica stores them; those that are not floating-point come as float64."""
        return self._request(BUFFERS, self.buffers)

    def end(self) -> None:
        """The other ranks return from `serve`."""
        self._send([END, 0])

    def _request(self, what: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        if not names:
            return {}
        known = {name: at for at, name in enumerate(self.buffers if what == BUFFERS else self.names)}
        wanted = [known[name] for name in names]
        self._send([what, len(wanted)])
        self._send(wanted)
        found = self._answer(what, names)
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
        return found

    def _send(self, numbers: list[int]) -> list[int]:
        """What rank 0 gives, on every rank."""
        message = torch.tensor(numbers, dtype=torch.float64, device=self.engine.mesh.device)
        all_reduce(message, self.engine.mesh.world).wait()
        return [int(number) for number in message.tolist()]

    # --- the other ranks ------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests until rank 0 ends."""
        while True:
            what, count = self._send([0] * HEADER)
            if what == END:
                return
            known = self.buffers if what == BUFFERS else self.names
            self._answer(what, [known[at] for at in self._send([0] * count)])

    # --- all ranks ------------------------------------------------------------------------------------------------------------

    def _answer(self, what: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        bucket: list[str] = []
        size = 0
        shapes = self.engine.beside.buffers if what == BUFFERS else self.engine.shapes
        keeps = self.engine.mesh.rank == 0
        for at, name in enumerate(names):
            bucket.append(name)
            size += shapes[name].numel()
            if size >= BUCKET_ELEMENTS or at + 1 == len(names):
                whole = self._summed(what, bucket)
                found |= whole if keeps else {}
                bucket, size = [], 0
        return found

    def _summed(self, what: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors `names`, on every rank."""
        shapes = self.engine.beside.buffers if what == BUFFERS else self.engine.shapes
        kind = torch.float64 if what == BUFFERS else self._type(what)
        sizes = [shapes[name].numel() for name in names]
        flat = torch.zeros(sum(sizes), dtype=kind, device=self.engine.mesh.device)
        whole = {name: part.view(shapes[name]) for name, part in zip(names, flat.split(sizes), strict=True)}
        for piece, data in self._held(what, set(names)):
            put(whole[piece.name.partition("/")[2]], piece, self._rounded(what, data))
        if flat.numel():
            all_reduce(flat, self.engine.mesh.world).wait()
        return whole

    def _type(self, what: int) -> torch.dtype:
        """Of what is sent; equal on all ranks, whatever they store."""
        if what == WEIGHTS:
            return self.compute
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def _rounded(self, what: int, data: torch.Tensor) -> torch.Tensor:
        data = data.detach().to(self.engine.mesh.device)
        return data.to(self.compute) if what == WEIGHTS else data

    def _held(self, what: int, names: set[str]) -> Iterator[Held]:
        engine = self.engine
        if what != BUFFERS:
            kind = "model" if what == WEIGHTS else "gradient"
            return (held for held in pieces_of(engine, kind, names) if not held.piece.name.startswith(REPLICA))
        place = engine.mesh.place
        first = engine.mesh.replica == 0 and place.cp == 0
        return (
            held
            for held in buffer_pieces(engine, saving=True)
            if first and held.piece.name.removeprefix(BUFFER) in names and (held.piece.split is not None or place.tp == 0)
        )


def put(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    """Add `data`, the run of `piece`, to its place in `whole`, which is zero there."""
    if piece.split is None:
        whole.view(-1)[piece.start : piece.stop].add_(data.view(-1))
        return
    local = torch.zeros(piece.local_shape, dtype=whole.dtype, device=whole.device)
    local.view(-1)[piece.start : piece.stop] = data.view(-1)
    offset = 0
    for start, stop in piece.intervals:
        whole.narrow(piece.split, start, stop - start).add_(local.narrow(piece.split, offset, stop - start))
        offset += stop - start
