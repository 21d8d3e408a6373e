"""Nodes as network namespaces behind one switch, each with a wire of its own rate, both ways; behind a relay (relay.py) where wires have a delay.

Promise: nothing is left behind, whatever dies. Namespaces have no names: each lives as long as the process that holds it and the ranks in
it, and the holders die with this process (PR_SET_PDEATHSIG); wires go with their namespaces. The machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from meshwright.base.errors import InputError
from meshwright.base.signals import REQUESTS
from meshwright.emulate.relay import relay, tap

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
SUBNET, DEVICE = "10.77.0", "eth0"
BURST = 32 * 2**10
"""Bytes that a wire lets through at once."""

QUEUE = "400ms"
LEAST = 0.5e-3
"""Seconds of a delay that is worth a relay: shorter ones are what the way from process to process takes anyway."""

INSTEAD = "without it `meshwright simulate` plays the cluster and `meshwright train --cluster local:N` runs its plan on equal ranks"


def address(node: int) -> str:
    """Of a node."""
    return f"{SUBNET}.{node + 1}"


class Wires:
    """A namespace per node, `rates` bytes/s each way, `delay` seconds from one to another. A context manager."""

    def __init__(self, rates: Sequence[float], delay: float = 0.0) -> None:
        if len(rates) > 250:
            raise InputError(f"{len(rates)} nodes are more than one switch of this emulator has room for (250)")
        self.rates, self.delay = tuple(rates), delay
        self._holders: list[int] = []
        self._nodes: list[int] = []

    def __enter__(self) -> Wires:
        try:
            if self.delay >= LEAST:
                self._nodes = [self._hold() for _ in self.rates]
                self._fork(self._taps, lambda taps: relay(taps, self.rates, self.delay))
            else:
                switch = self._hold()
                _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
                _inside(switch, "ip", "link", "set", "switch", "up")
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
        _enter(self._nodes[node])

    def _wire(self, switch: int, node: int) -> None:
        """From `node` to the switch, whose end carries what the node takes at its rate."""
        port = f"node{node}"
        _inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(self._nodes[node]))
        _inside(switch, "ip", "link", "set", port, "master", "switch", "up")
        _inside(switch, "tc", "qdisc", "add", "dev", port, *_shape(self.rates[node]))

    def _open(self, node: int, rate: float) -> None:
        holder = self._nodes[node]
        _inside(holder, "ip", "address", "add", f"{address(node)}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _inside(holder, "ip", "link", "set", device, "up")
        _inside(holder, "tc", "qdisc", "add", "dev", DEVICE, *_shape(rate))

    def _taps(self) -> list[int]:
        found = []
        for holder in self._nodes:
            _enter(holder)
            found.append(tap(DEVICE))
        return found

    def _hold(self) -> int:
        """A process in a network of its own that does nothing."""
        return self._fork(_own_network, lambda _: _pause())

    def _fork(self, begin: Callable[[], Any], live: Callable[[Any], NoReturn]) -> int:
        """A process that lives with what it began with until it is killed, or this one dies."""
        parent, (told, tell) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for number in REQUESTS:
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
            raise InputError(words or f"emulate: a process of the network died at once; {INSTEAD}")
        return pid


def _own_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise InputError(f"emulate: this user may not make network namespaces (root may); {INSTEAD}")


def _pause() -> NoReturn:
    while True:
        signal.pause()


def _shape(rate: float) -> tuple[str, ...]:
    return ("root", "tbf", "rate", f"{max(int(rate * 8), 8000)}bit", "burst", f"{max(BURST, int(rate / 1000))}b", "latency", QUEUE)


def _enter(holder: int) -> None:
    handle = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


def _inside(holder: int, *command: str) -> None:
    """A command in the network of `holder`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: _enter(holder), check=False)
    except FileNotFoundError:
        raise InputError(f"emulate: the program {command[0]!r} is missing (package iproute2); {INSTEAD}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"emulate: `{' '.join(command)}` failed: {said}; {INSTEAD}")
