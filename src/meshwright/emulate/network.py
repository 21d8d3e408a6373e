"""Nodes as network namespaces behind one switch, each with a wire of its own rate, both ways.

Promise: nothing is left behind, whatever dies. Namespaces have no names: each lives as long as the process that holds it and the ranks in
it, and the holders die with this process (PR_SET_PDEATHSIG); wires go with their namespaces. The machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

from meshwright.base.errors import InputError

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
SUBNET, DEVICE = "10.77.0", "eth0"
BURST = 32 * 2**10
"""Bytes that a wire lets through at once."""

QUEUE = "400ms"
INSTEAD = "without it `meshwright simulate` plays the cluster and `meshwright train --cluster local:N` runs its plan on equal ranks"


def address(node: int) -> str:
    """Of a node."""
    return f"{SUBNET}.{node + 1}"


class Wires:
    """A namespace per node, `rates` bytes/s each way. A context manager."""

    def __init__(self, rates: Sequence[float]) -> None:
        if len(rates) > 250:
            raise InputError(f"{len(rates)} nodes are more than one switch of this emulator has room for (250)")
        self.rates = tuple(rates)
        self._holders: list[int] = []

    def __enter__(self) -> Wires:
        try:
            switch = self._hold()
            _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
            _inside(switch, "ip", "link", "set", "switch", "up")
            for node, rate in enumerate(self.rates):
                self._wire(switch, self._hold(), node, rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._holders:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._holders = []

    def enter(self, node: int) -> None:
        """Moves the calling process, one that was just forked, into the network of `node`."""
        _enter(self._holders[1 + node])

    def _wire(self, switch: int, holder: int, node: int, rate: float) -> None:
        port = f"node{node}"
        _inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(holder))
        _inside(switch, "ip", "link", "set", port, "master", "switch", "up")
        _inside(holder, "ip", "address", "add", f"{address(node)}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _inside(holder, "ip", "link", "set", device, "up")
        shape = ("root", "tbf", "rate", f"{max(int(rate * 8), 8000)}bit", "burst", f"{max(BURST, int(rate / 1000))}b", "latency", QUEUE)
        _inside(switch, "tc", "qdisc", "add", "dev", port, *shape)
        _inside(holder, "tc", "qdisc", "add", "dev", DEVICE, *shape)

    def _hold(self) -> int:
        """A process in a network of its own that does nothing until it is killed, or this one dies."""
        parent, (told, tell) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            made = ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0
            os.write(tell, b"1" if made and os.getppid() == parent else b"0")
            os.close(tell)
            while made:
                signal.pause()
            os._exit(1)
        os.close(tell)
        self._holders.append(pid)
        with os.fdopen(told, "rb") as said:
            if said.read(1) != b"1":
                raise InputError(f"emulate: this user may not make network namespaces (root may); {INSTEAD}")
        return pid


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
