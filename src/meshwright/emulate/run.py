"""One command on every rank of an emulated cluster, as a launcher of several nodes would start it."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from meshwright.base.errors import InputError, MeshwrightError
from meshwright.base.signals import hearing
from meshwright.emulate.network import DEVICE, INSTEAD, PR_SET_PDEATHSIG, Wires, address
from meshwright.emulate.scale import Scaled
from meshwright.emulate.shares import Shares

PORT = "29517"
GRACE, TICK = 10.0, 0.05


class Emulated:
    """A cluster that is there: `environment` and `enter` make a process one of its ranks, `fork` makes all of them."""

    def __init__(self, scaled: Scaled, wires: Wires, shares: Shares) -> None:
        self.scaled, self.wires, self.shares, self._emulator = scaled, wires, shares, os.getpid()

    @property
    def world(self) -> int:
        return len(self.scaled.nodes)

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set."""
        nodes = self.scaled.nodes
        node = nodes[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank - nodes.index(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def enter(self, rank: int) -> None:
        """Makes the calling process, one that was just forked, stand where `rank` stands; it dies with its parent, now if that is gone already."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._emulator:
            os._exit(1)
        self.wires.enter(self.scaled.nodes[rank])
        self.shares.enter(rank)

    def fork(self, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` on every rank, each forked from this process; what they return, in order. MeshwrightError names those that failed."""
        pipes, processes = [], []
        for rank in range(self.world):
            ours, theirs = os.pipe()
            process = os.fork()
            if process == 0:
                self._be(rank, function, theirs)
            os.close(theirs)
            pipes.append(ours)
            processes.append(process)
        said = []
        for pipe in pipes:
            with os.fdopen(pipe, "rb") as answer:
                said.append(answer.read())
        failed = [rank for rank, process in enumerate(processes) if os.waitpid(process, 0)[1]]
        if failed:
            raise MeshwrightError(f"emulate: ranks {', '.join(map(str, failed))} of {self.world} failed; what they said stands above")
        return [pickle.loads(each) for each in said]

    def _be(self, rank: int, function: Callable[[int], Any], answer: int) -> NoReturn:
        """The life of a forked rank."""
        code = 1
        try:
            self.enter(rank)
            os.environ.update(self.environment(rank))
            with os.fdopen(answer, "wb") as pipe:
                pipe.write(pickle.dumps(function(rank)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


@contextmanager
def emulated(scaled: Scaled) -> Iterator[Emulated]:
    """The cluster for as long as the block lasts. InputError says in one line what this machine or user lacks, and what works without."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise InputError(f"emulate: network namespaces and quotas of processor time are root's; {INSTEAD}")
    with ExitStack() as stack:
        shares = stack.enter_context(Shares(scaled.shares))
        yield Emulated(scaled, stack.enter_context(Wires(scaled.wires, scaled.delay)), shares)


def run(cluster: Emulated, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """`command` on every rank; the exit status of the first that failed, after which the others are ended."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for rank in ranks:  # which end as they see fit
            rank.send_signal(number)

    with hearing(pass_on):
        try:
            for rank in range(cluster.world):
                ranks.append(_start(cluster, rank, command, environment))
            return _watch(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _start(cluster: Emulated, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # nodes have addresses and no names, of which every connection would warn
    try:
        return subprocess.Popen(
            command,
            env={**quiet, **environment, **cluster.environment(rank)},
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C of the terminal reaches this process alone, which passes it on
            preexec_fn=lambda: cluster.enter(rank),
        )
    except FileNotFoundError:
        raise InputError(f"emulate: there is no program {command[0]!r}") from None
    except subprocess.SubprocessError as error:
        raise MeshwrightError(f"emulate: rank {rank} could not enter its node: {error}") from None


def _watch(ranks: list[subprocess.Popen[bytes]]) -> int:
    failed, end = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        codes = [code for rank in ranks if (code := rank.poll()) is not None]
        if any(codes) and end == float("inf"):
            failed, end = next(filter(None, codes)), time.monotonic() + GRACE
        time.sleep(TICK)
    return failed or next(filter(None, (rank.poll() for rank in ranks)), 0)
