"""A switch in user space for links with a delay, which the kernel's shaping by rate (tbf) does not know and its emulator of networks (netem) knows where it is built in.

Each node has a tap device instead of a wire. One process reads what leaves the nodes, at the rate that the kernel shapes it to, and hands every frame to the
node that it is for, no faster than that node's rate and `delay` seconds later. Frames that would wait longer than QUEUE for a node's turn are dropped, as a switch does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NoReturn

from meshwright.base.errors import InputError

TUN, TUNSETIFF, TAP_NO_INFO = "/dev/net/tun", 0x400454CA, 0x0002 | 0x1000
FRAME, TOGETHER = 65536, 32
"""Bytes of the largest frame, and how many are read from one node before the others have their turn."""

QUEUE = 0.4
NAMES = slice(0, 6), slice(6, 12)
"""Of a frame, whom it is for and whom it is from."""


def tap(name: str) -> int:
    """A handle of a new tap device of the network that the calling process is in."""
    try:
        handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_NO_INFO))
    except OSError as error:
        raise InputError(
            f"emulate: links with a delay need tap devices, and {TUN} says: {error.strerror}; a cluster file whose links have `latency: 0` runs without"
        ) from None
    return handle


def relay(taps: Sequence[int], rates: Sequence[float], delay: float) -> NoReturn:
    """Never ends. `rates`: bytes/s that each node takes."""
    known: dict[bytes, int] = {}
    free = [0.0] * len(taps)
    nodes = {handle: node for node, handle in enumerate(taps)}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, node, frame = heappop(waiting)
            _write(taps[node], frame)
        for handle in select.select(taps, (), (), waiting[0][0] - now if waiting else None)[0]:
            for frame in _frames(handle):
                known[frame[NAMES[1]]] = nodes[handle]
                to = known.get(frame[NAMES[0]])
                now = time.monotonic()
                for node in (to,) if to is not None else [node for node in nodes.values() if node != nodes[handle]]:
                    if free[node] > now + QUEUE:
                        continue
                    free[node] = max(free[node], now) + len(frame) / rates[node]
                    count += 1
                    heappush(waiting, (free[node] + delay, count, node, frame))


def _frames(handle: int) -> list[bytes]:
    """What lies there now, some of it."""
    found: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < TOGETHER:
            found.append(os.read(handle, FRAME))
    return found


def _write(handle: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the node is full, or not up yet: the frame is lost, as on a wire
        os.write(handle, frame)
