"""How a described cluster becomes shares of this machine's cores and rates of its links.

The fastest device takes as much of a core as the cores allow for all, each other one its part of that: speeds stand to
each other as described.
Time then runs slower by one factor, `motion`: the described peak over what the share of a core gives. Links between
nodes carry their
described rate divided by the same factor and their latency times it, so that compute and communication stand to each
other as described, too.

>>> from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
>>> def group(peak):
...     device = Device(name="a", memory=1e9, bandwidth=1e9, peak={"fp32": peak})
...     return NodeGroup(nodes=1, devices=1, device=device, link=Link(name="in", bandwidth=1e9))
>>> network = Link(name="out", bandwidth=1e9, efficiency=1.0)
>>> pair = Cluster(name="pair", groups=(group(2e12), group(1e12)), network=network)
>>> found = scale_to_machine(pair, cores=1, core=80e9)
>>> [round(share, 3) for share in found.shares], round(found.motion, 1), [round(rate / 1e6, 1) for rate in found.wires]
([0.6, 0.3], 33.3, [30.0, 30.0])

Ranks on shares of a core: a control group each, with a quota of processor time in short periods.

Groups are removed at the end; those of a run that was killed are empty by then, as its ranks die with it, and the next
run removes them.

One command on every rank of an emulated cluster, as a launcher of several nodes would start it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bench.emulation.network import (
    ALTERNATIVES,
    INTERFACE,
    PR_SET_PDEATHSIG,
    ShapedLinks,
    UplinkTier,
    node_address,
)
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.signals import stop_signal_handler
from meshwright.spec.cluster import Cluster

USABLE_CORE_FRACTION = 0.9
"""Of the cores, what ranks may take: the rest is for the network and whoever watches."""

MIN_CORE_FRACTION = 0.02
"""Share of a core below which a process hardly moves."""


class ScaledCluster(NamedTuple):
    """By rank: `shares` of a core, `nodes` (the node that it is on); by node: `wires`, bytes/s to the others; by how
    much time is slower."""

    shares: tuple[float, ...]
    nodes: tuple[int, ...]
    wires: tuple[float, ...]
    motion: float
    delay: float = 0.0
    """Seconds from one node to another, on top of what this machine takes anyway."""
    tiers: tuple[UplinkTier, ...] = ()
    """The links of racks, pods and sites, innermost first."""


def scale_to_machine(cluster: Cluster, cores: float, core: float) -> ScaledCluster:
    """`cores` of `core` FLOP/s each play `cluster`. Raises InputError where that is too much for them."""
    speeds: list[float] = []
    nodes: list[int] = []
    wires: list[float] = []
    for group in cluster.groups:
        for _ in range(group.nodes):
            nodes += [len(wires)] * group.devices
            speeds += [_common_peak(cluster, group.device.peak) * group.device.efficiency] * group.devices
            wires.append(cluster.network.bandwidth * cluster.network.efficiency * group.devices)
    fastest = max(speeds)
    most = min(1.0, USABLE_CORE_FRACTION * cores * fastest / sum(speeds))
    shares = [most * speed / fastest for speed in speeds]
    if min(shares) < MIN_CORE_FRACTION:
        raise InputError(
            f"cluster {cluster.name!r}: {len(speeds)} ranks on {cores:g} cores leave the slowest {min(shares):.1%} "
            f"of a core and it needs {MIN_CORE_FRACTION:.0%}; emulate fewer devices, or play it with `meshwright "
            "simulate`"
        )
    motion = fastest / (most * core)
    first = [nodes.index(node) for node in range(len(wires))]
    tiers = tuple(
        UplinkTier(
            tuple(rank // inner.span for rank in first),
            link.bandwidth * link.efficiency * inner.span / motion,
            link.latency * motion,
        )
        for inner, link in pairwise((cluster.network, *cluster.tiers))
    )
    wires = [wire / motion for wire in wires]
    return ScaledCluster(tuple(shares), tuple(nodes), tuple(wires), motion, cluster.network.latency * motion, tiers)


def _common_peak(cluster: Cluster, peak: dict[str, float]) -> float:
    """FLOP/s at a precision that all devices have: fp32, else the first that they share."""
    common = [
        name
        for name in ("fp32", "tf32", "bf16", "fp16", "fp64")
        if all(group.device.peak.get(name) for group in cluster.groups)
    ]
    if not common:
        raise InputError(
            f"cluster {cluster.name!r}: its devices have no precision in common, so that their speeds cannot be "
            "compared"
        )
    return peak[common[0]]


CGROUP_ROOT = Path("/sys/fs/cgroup")
QUOTA_PERIOD_MICROSECONDS = 10_000
"""Microseconds over which a quota counts: a step of training is many of them."""

FULL_CORE_FRACTION = 0.999
_GROUP_NAME_PATTERN = re.compile(r"meshwright-(\d+)-\d+")


class CpuQuotas:
    """`shares` of a core by rank. A context manager."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares, self._owner = tuple(shares), os.getpid()
        self.root = CGROUP_ROOT / "cpu" if (CGROUP_ROOT / "cpu" / "cpu.cfs_quota_us").exists() else CGROUP_ROOT

    def __enter__(self) -> CpuQuotas:
        self._sweep()
        for rank, share in enumerate(self.shares):
            if share < FULL_CORE_FRACTION:
                self._make(self._folder(rank), share)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self.shares)):
            with contextlib.suppress(OSError):
                self._folder(rank).rmdir()

    def enter(self, rank: int, pid: int = 0) -> None:
        """Moves process `pid`, or the calling one, onto the share of `rank`."""
        if self.shares[rank] < FULL_CORE_FRACTION:
            (self._folder(rank) / "cgroup.procs").write_text(str(pid or os.getpid()))

    def change(self, rank: int, share: float) -> None:
        """From now on `rank` has another share: a straggler, or one that recovers."""
        _set_quota(self._folder(rank), share)

    def _folder(self, rank: int) -> Path:
        return self.root / f"meshwright-{self._owner}-{rank}"

    def _make(self, folder: Path, share: float) -> None:
        try:
            folder.mkdir(exist_ok=True)
            if self.root == CGROUP_ROOT and not (folder / "cpu.max").exists():
                (CGROUP_ROOT / "cgroup.subtree_control").write_text("+cpu")
            _set_quota(folder, share)
        except OSError as error:
            raise InputError(
                f"emulate: no quota of processor time in {folder.parent} ({error.strerror}; root may); {ALTERNATIVES}"
            ) from None

    def _sweep(self) -> None:
        for folder in self._left():
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _left(self) -> Iterator[Path]:
        """Groups whose emulator is gone."""
        for folder in self.root.glob("meshwright-*") if self.root.is_dir() else ():
            match = _GROUP_NAME_PATTERN.fullmatch(folder.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                yield folder


def _set_quota(folder: Path, share: float) -> None:
    quota = max(int(share * QUOTA_PERIOD_MICROSECONDS), 1000)
    period = max(QUOTA_PERIOD_MICROSECONDS, int(1000 / share))
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
        return
    (folder / "cpu.cfs_period_us").write_text(str(period))
    (folder / "cpu.cfs_quota_us").write_text(str(quota))


MASTER_PORT = "29517"
GRACE_SECONDS, POLL_SECONDS = 10.0, 0.05


class EmulatedCluster:
    """A cluster that is there: `environment` and `enter` make a process one of its ranks, `fork` makes all of them."""

    def __init__(self, scaled: ScaledCluster, wires: ShapedLinks, shares: CpuQuotas) -> None:
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
            "MASTER_ADDR": node_address(0),
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def enter(self, rank: int) -> None:
        """Makes the calling process, one that was just forked, stand where `rank` stands; it dies with its parent, now
        if that is gone already."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._emulator:
            os._exit(1)
        self.wires.enter(self.scaled.nodes[rank])
        self.shares.enter(rank)

    def fork(self, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` on every rank, each forked from this process; what they return, in order. MeshwrightError
        names those that failed."""
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
            raise MeshwrightError(
                f"emulate: ranks {', '.join(map(str, failed))} of {self.world} failed; what they said stands above"
            )
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
def emulate_cluster(scaled: ScaledCluster) -> Iterator[EmulatedCluster]:
    """The cluster for as long as the block lasts. InputError says in one line what this machine or user lacks, and what
    works without."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise InputError(f"emulate: network namespaces and quotas of processor time are root's; {ALTERNATIVES}")
    with ExitStack() as stack:
        shares = stack.enter_context(CpuQuotas(scaled.shares))
        yield EmulatedCluster(
            scaled, stack.enter_context(ShapedLinks(scaled.wires, scaled.delay, scaled.tiers)), shares
        )


def run_on_ranks(cluster: EmulatedCluster, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """`command` on every rank; the exit status of the first that failed, after which the others are ended."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for rank in ranks:  # which end as they see fit
            rank.send_signal(number)

    with stop_signal_handler(pass_on):
        try:
            for rank in range(cluster.world):
                ranks.append(_start_rank(cluster, rank, command, environment))
            return _wait_for_ranks(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _start_rank(
    cluster: EmulatedCluster, rank: int, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
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


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]]) -> int:
    failed, end = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        codes = [code for rank in ranks if (code := rank.poll()) is not None]
        if any(codes) and end == float("inf"):
            failed, end = next(filter(None, codes)), time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return failed or next(filter(None, (rank.poll() for rank in ranks)), 0)
