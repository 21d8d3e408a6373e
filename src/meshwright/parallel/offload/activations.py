"""What blocks keep between their forward and their backward, in host memory meanwhile.

[Note: beside] On an accelerator copies go over a stream of their own. What a block keeps leaves while the next block runs, and the device lets go
of it when that one is through; while a block runs backward, what the block before it kept comes up. So two blocks of it are on the device at
most, which is what cost/offload.py prices, and what the last block keeps is there when backward begins.

[Note: one stream's memory] Memory on the device is taken and given back by the stream that computes, which has then waited for the copy: nothing
is written, or read, after its memory has gone to somebody else, also when a step ends in an error (`Block.__del__`).

A tensor that a block keeps several times (the input of three projections) goes once. Tensors of other kinds, or on other devices, stay. What is
kept is not written any more while it is copied: autograd refuses models that write what they keep.
Source of the stream and of what waits for what: torchtune's OffloadActivations; torch's save_on_cpu is the same on the stream that computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Activations:
    """Of one rank, whose blocks run on `device`. `weights`: storages that stay where they are. `stream`: for copies; None where memory is the host's."""

    def __init__(self, device: torch.device, weights: Collection[int]) -> None:
        self.device, self.weights = device, weights
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = self._opened = _nobody

    @contextmanager
    def kept_by(self, place: int) -> Iterator[Block]:
        """Around the forward of the block number `place` of its stage."""
        before = self._last()
        block = Block(self, before if before is not None and before.place == place - 1 else None, place)
        with saved_tensors_hooks(block.keep, taken):
            yield block
        if before is not None:
            before.let_go()
        block.leave()
        self._last = weakref.ref(block)

    def open(self, block: Block) -> None:
        """`block` runs backward: the one that did before needs nothing any more, the next one's comes."""
        opened = self._opened()
        if opened is block:
            return
        if opened is not None:
            opened.let_go()
        self._opened = weakref.ref(block)
        block.fetch()
        before = block.before()
        if before is not None:
            before.fetch()


class Block:
    """What one block keeps of one pass. Alive as long as its backward needs it."""

    def __init__(self, rank: Activations, before: Block | None, place: int) -> None:
        self.rank, self.place = rank, place
        self.before = _nobody if before is None else weakref.ref(before)
        self._host: list[torch.Tensor] = []
        self._here: list[torch.Tensor] = []
        self._places: dict[Any, int] = {}
        self._moving: torch.cuda.Event | None = None
        self._coming = False

    # --- forward --------------------------------------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> Any:
        """What autograd holds instead of `tensor`."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type != self.rank.device.type or storage_of(tensor) in self.rank.weights:
            return tensor
        key = (storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._places:
            self._places[key] = len(self._host)
            self._host.append(self._sent(tensor))
            self._here.append(tensor.detach())
        return self, self._places[key]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its copy in host memory, which on an accelerator is pinned and filled beside what runs."""
        stream = self.rank.stream
        if stream is None:
            return torch.empty_like(tensor).copy_(tensor)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.rank.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def leave(self) -> None:
        """Its forward is over."""
        self._places.clear()
        if self.rank.stream is None:
            self._here.clear()
        else:
            self._moving = self.rank.stream.record_event()

    def let_go(self) -> None:
        """The device needs it no more for now."""
        if self._here and self.rank.stream is not None:
            computing = torch.cuda.current_stream(self.rank.device)
            if self._moving is None:  # an error came before the end of forward
                computing.wait_stream(self.rank.stream)
            else:
                computing.wait_event(self._moving)
        self._here.clear()

    __del__ = let_go

    # --- backward -------------------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begin to bring it up, unless it is here."""
        stream = self.rank.stream
        if stream is None or self._here or not self._host:
            return
        self._here = [torch.empty_like(host, device=self.rank.device) for host in self._host]
        stream.wait_stream(torch.cuda.current_stream(self.rank.device))
        with torch.cuda.stream(stream):
            for here, host in zip(self._here, self._host, strict=True):
                here.copy_(host, non_blocking=True)
        self._moving, self._coming = stream.record_event(), True

    def take(self, place: int) -> torch.Tensor:
        self.rank.open(self)
        if self.rank.stream is None:
            return self._host[place]
        self.fetch()
        if self._coming and self._moving is not None:
            torch.cuda.current_stream(self.rank.device).wait_event(self._moving)
        return self._here[place]


def storage_of(tensor: torch.Tensor) -> int:
    """The same number as long as the storage lives, also when it is emptied and filled again (ZeRO 3)."""
    return tensor.untyped_storage()._cdata


def taken(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    block, place = kept
    return block.take(place)  # type: ignore[no-any-return]


def _nobody() -> Block | None:
    return None
