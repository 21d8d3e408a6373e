"""A switch in user space for links with a delay, which the kernel's shaping by rate (tbf) does not know and its
emulator of networks (netem) knows where it is built in.

Each node has a tap device instead of a wire. One process reads what leaves the nodes, at the rate that the kernel
shapes it to, and hands every frame to the
node that it is for, no faster than that node's rate and `delay` seconds later. Frames that would wait longer than QUEUE
for a node's turn are dropped, as a switch does.

Nodes as network namespaces behind one switch, each with a wire of its own rate, both ways; behind a relay (relay.py)
where wires have a delay.

Guarantee: nothing is left behind, whatever dies. Namespaces have no names: each lives as long as the process that holds
it and the ranks in
it, and the holders die with this process (PR_SET_PDEATHSIG); wires go with their namespaces. The machine's own network
is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, NoReturn

from meshwright.core.errors import InputError
from meshwright.core.signals import STOP_SIGNALS

TUN_DEVICE, TUNSETIFF, TAP_NO_INFO = "/dev/net/tun", 0x400454CA, 0x0002 | 0x1000
MAX_FRAME_BYTES, MAX_FRAMES_PER_TURN = 65536, 32
"""Bytes of the largest frame, and how many are read from one node before the others have their turn."""

MAX_QUEUE_SECONDS = 0.4
MAC_FIELDS = slice(0, 6), slice(6, 12)
"""Of a frame, whom it is for and whom it is from."""


def open_tap(name: str) -> int:
    """A handle of a new tap device of the network that the calling process is in."""
    try:
        handle = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_NO_INFO))
    except OSError as error:
        raise InputError(
            f"emulate: links with a delay need tap devices, and {TUN_DEVICE} says: {error.strerror}; a cluster file "
            "whose links have `latency: 0` runs without"
        ) from None
    return handle


class UplinkTier(NamedTuple):
    """The links of blocks of nodes, such as racks or sites: the block of each node, the bytes/s of a block's link each
    way, and the seconds from one block to another."""

    blocks: tuple[int, ...]
    rate: float
    delay: float


def relay_frames(
    taps: Sequence[int], rates: Sequence[float], delay: float, tiers: Sequence[UplinkTier] = ()
) -> NoReturn:
    """Never ends. `rates`: bytes/s that each node takes. `tiers`: the links of blocks, innermost first, that frames
    between two blocks pass too."""
    known: dict[bytes, int] = {}
    free: defaultdict[tuple[object, ...], float] = defaultdict(float)
    nodes = {handle: node for node, handle in enumerate(taps)}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, node, frame = heappop(waiting)
            _write_frame(taps[node], frame)
        for handle in select.select(taps, (), (), waiting[0][0] - now if waiting else None)[0]:
            for frame in _read_frames(handle):
                known[frame[MAC_FIELDS[1]]] = nodes[handle]
                to = known.get(frame[MAC_FIELDS[0]])
                now = time.monotonic()
                for node in (to,) if to is not None else [node for node in nodes.values() if node != nodes[handle]]:
                    path, latency = _path(nodes[handle], node, rates, delay, tiers)
                    if any(free[port] > now + latency + MAX_QUEUE_SECONDS for port, _ in path):
                        continue
                    for port, rate in path:
                        now = free[port] = max(free[port], now) + len(frame) / rate
                    count += 1
                    heappush(waiting, (now + latency, count, node, frame))


def _path(
    sender: int, receiver: int, rates: Sequence[float], delay: float, tiers: Sequence[UplinkTier]
) -> tuple[list[tuple[tuple[object, ...], float]], float]:
    """The ports on the way from node to node with their bytes/s, and the seconds of the way.

    >>> sites = UplinkTier((0, 0, 1, 1), 10.0, 0.5)
    >>> _path(0, 1, [100.0] * 4, 0.1, [sites]), _path(0, 3, [100.0] * 4, 0.1, [sites])[1]
    (([((1,), 100.0)], 0.1), 0.5)
    """
    ways: list[tuple[tuple[object, ...], float]] = []
    for at, tier in enumerate(tiers):
        if (ours := tier.blocks[sender]) != (theirs := tier.blocks[receiver]):
            ways += [((at, "out", ours), tier.rate), ((at, "in", theirs), tier.rate)]
            delay = tier.delay
    return [*ways, ((receiver,), rates[receiver])], delay


def _read_frames(handle: int) -> list[bytes]:
    """What lies there now, some of it."""
    found: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < MAX_FRAMES_PER_TURN:
            found.append(os.read(handle, MAX_FRAME_BYTES))
    return found


def _write_frame(handle: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the node is full, or not up yet: the frame is lost, as on a wire
        os.write(handle, frame)


CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
SUBNET, INTERFACE = "10.77.0", "eth0"
BURST_BYTES = 32 * 2**10
"""Bytes that a wire lets through at once."""

QUEUE_LATENCY = "400ms"
MIN_RELAY_DELAY_SECONDS = 0.5e-3
"""Seconds of a delay that is worth a relay: shorter ones are what the way from process to process takes anyway."""

ALTERNATIVES = (
    "without it `meshwright simulate` plays the cluster and `meshwright train --cluster local:N` runs its plan on "
    "equal ranks"
)


def node_address(node: int) -> str:
    """Of a node."""
    return f"{SUBNET}.{node + 1}"


class ShapedLinks:
    """A namespace per node, `rates` bytes/s each way, `delay` seconds from one to another, and `tiers` between blocks
    of nodes. A context manager."""

    def __init__(self, rates: Sequence[float], delay: float = 0.0, tiers: Sequence[UplinkTier] = ()) -> None:
        if len(rates) > 250:
            raise InputError(f"{len(rates)} nodes are more than one switch of this emulator has room for (250)")
        self.rates, self.delay, self.tiers = tuple(rates), delay, tuple(tiers)
        self._holders: list[int] = []
        self._nodes: list[int] = []

    def __enter__(self) -> ShapedLinks:
        try:
            if self.tiers or self.delay >= MIN_RELAY_DELAY_SECONDS:
                self._nodes = [self._hold() for _ in self.rates]
                self._fork(self._taps, lambda taps: relay_frames(taps, self.rates, self.delay, self.tiers))
            else:
                switch = self._hold()
                _run_in_namespace(switch, "ip", "link", "add", "switch", "type", "bridge")
                _run_in_namespace(switch, "ip", "link", "set", "switch", "up")
                self._nodes = [self._hold() for _ in self.rates]
                for node in range(len(self.rates)):
                    self._wire(switch, node)
            for node, rate in enumerate(self.rates):
                self._open(node, rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._holders:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._holders, self._nodes = [], []

    def enter(self, node: int) -> None:
        """Moves the calling process, one that was just forked, into the network of `node`."""
        _enter_namespace(self._nodes[node])

    def _wire(self, switch: int, node: int) -> None:
        """From `node` to the switch, whose end carries what the node takes at its rate."""
        port = f"node{node}"
        _run_in_namespace(
            switch,
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            str(self._nodes[node]),
        )
        _run_in_namespace(switch, "ip", "link", "set", port, "master", "switch", "up")
        _run_in_namespace(switch, "tc", "qdisc", "add", "dev", port, *_shaping_arguments(self.rates[node]))

    def _open(self, node: int, rate: float) -> None:
        holder = self._nodes[node]
        _run_in_namespace(holder, "ip", "address", "add", f"{node_address(node)}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run_in_namespace(holder, "ip", "link", "set", device, "up")
        _run_in_namespace(holder, "tc", "qdisc", "add", "dev", INTERFACE, *_shaping_arguments(rate))

    def _taps(self) -> list[int]:
        found = []
        for holder in self._nodes:
            _enter_namespace(holder)
            found.append(open_tap(INTERFACE))
        return found

    def _hold(self) -> int:
        """A process in a network of its own that does nothing."""
        return self._fork(_unshare_network, lambda _: _sleep_forever())

    def _fork(self, begin: Callable[[], Any], live: Callable[[Any], NoReturn]) -> int:
        """A process that lives with what it began with until it is killed, or this one dies."""
        parent, (told, tell) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # a Ctrl-C reaches it too: the ranks need their network to save
            try:
                made = begin()
                os.write(tell, b"well")
                for handle in (told, tell):
                    os.close(handle)
                if os.getppid() == parent:
                    live(made)
            except InputError as error:
                os.write(tell, str(error).encode())
            finally:
                os._exit(1)
        os.close(tell)
        self._holders.append(pid)
        with os.fdopen(told, "rb") as said:
            words = said.read().decode()
        if words != "well":
            raise InputError(words or f"emulate: a process of the network died at once; {ALTERNATIVES}")
        return pid


def _unshare_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise InputError(f"emulate: this user may not make network namespaces (root may); {ALTERNATIVES}")


def _sleep_forever() -> NoReturn:
    while True:
        signal.pause()


def _shaping_arguments(rate: float) -> tuple[str, ...]:
    return (
        "root",
        "tbf",
        "rate",
        f"{max(int(rate * 8), 8000)}bit",
        "burst",
        f"{max(BURST_BYTES, int(rate / 1000))}b",
        "latency",
        QUEUE_LATENCY,
    )


def _enter_namespace(holder: int) -> None:
    handle = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


def _run_in_namespace(holder: int, *command: str) -> None:
    """A command in the network of `holder`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=lambda: _enter_namespace(holder), check=False
        )
    except FileNotFoundError:
        raise InputError(f"emulate: the program {command[0]!r} is missing (package iproute2); {ALTERNATIVES}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"emulate: `{' '.join(command)}` failed: {said}; {ALTERNATIVES}")
