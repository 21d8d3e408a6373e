"""Bytes of a device on their way to the host beside what it computes: by a stream of its own, through two pinned chunks in turn.

A thread that just copies gives its copies to the stream that training uses: each then waits for the kernels before it, and those behind wait for it;
into memory that is not pinned the driver copies by itself, bit by bit. Here one chunk fills while the other is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CHUNK = 1 << 25
"""Bytes of a chunk."""


class Lift:
    """From `device`. Not for two threads at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.chunks = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.arrived = [torch.cuda.Event(blocking=True) for _ in range(2)]

    def begin(self) -> None:
        """What is read from here on is as the work leaves it that this thread has handed over so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def parts(self, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of `source` on the host and where they begin in it, each part until the next one is asked for."""

        def start(chunk: int, at: int, size: int) -> None:
            with torch.cuda.stream(self.stream):
                self.chunks[chunk][:size].copy_(source[at : at + size], non_blocking=True)
                self.arrived[chunk].record(self.stream)

        for chunk, at, size in in_turn(source.numel(), CHUNK, start, lambda chunk: self.arrived[chunk].synchronize()):
            yield at, self.chunks[chunk][:size]


def in_turn(size: int, most: int, start: Callable[[int, int, int], None], arrived: Callable[[int], None]) -> Iterator[tuple[int, int, int]]:
    """Which of two chunks holds which bytes: place and length. The next part is on its way before one is handed out, in the chunk that was read before.

    >>> said = []
    >>> for part in in_turn(5, 2, lambda *part: said.append(("start", *part)), lambda chunk: said.append(("arrived", chunk))):
    ...     said.append(("read", part[0]))
    >>> said[:4]
    [('start', 0, 0, 2), ('start', 1, 2, 2), ('arrived', 0), ('read', 0)]
    >>> said[4:]
    [('start', 0, 4, 1), ('arrived', 1), ('read', 1), ('arrived', 0), ('read', 0)]
    """
    cuts = [(number % 2, at, min(most, size - at)) for number, at in enumerate(range(0, size, most))]
    for cut in cuts[:1]:
        start(*cut)
    for number, cut in enumerate(cuts):
        for following in cuts[number + 1 : number + 2]:
            start(*following)
        arrived(cut[0])
        yield cut
