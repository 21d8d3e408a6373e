"""An emulated cluster: real processes behind shaped links on shares of the cores; what this user may not do is said in
one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.emulation.emulated_cluster import EmulatedCluster, ScaledCluster, emulate_cluster
from bench.emulation.network import UplinkTier
from equality import alone, check, train_between_hosts

from meshwright.core.errors import InputError
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.host_process import host_id
from meshwright.runtime.profiler.device import cgroup_cpu_quota
from meshwright.runtime.profiler.links import CollectiveProfiler
from meshwright.spec.cluster import LinkSample
from meshwright.spec.plan import Plan, parse_plan

JOB = """
model: {name: llama-tiny, sizes: {layers: 2, hidden: 32, heads: 4, kv_heads: 4, head_dim: 8, ffn: 64, vocab: 258, seq: \
64}}
workload: {sequence: 32, batch: 8, steps: 4, precision: fp32}
data: {source: text.txt, tokenizer: bytes, held_out: 0.1}
cluster: {name: "local:2"}
"""
WIRE = 4e6
MESSAGE, TIMES = 2**20, 20
"""Bytes that show the rate of a wire, of which what it lets through at once is little; how often one is sent until it
was not held up."""
NODES = ScaledCluster(shares=(0.6, 0.6, 0.3, 0.3), nodes=(0, 0, 1, 1), wires=(WIRE, WIRE), motion=1.0)


def permitted() -> bool:
    """Whether this user may make network namespaces and quotas."""
    try:
        with emulate_cluster(NODES._replace(shares=(0.5,), nodes=(0,), wires=(WIRE,))):
            return True
    except InputError as error:
        assert "meshwright simulate" in str(error) and "\n" not in str(error)
        return False


def need_networks() -> None:
    """Skips the test where there can be none, so that a run says so."""
    if not permitted():
        pytest.skip("this user may make no network namespaces and quotas")


def on_ranks(cluster: EmulatedCluster, function: Callable[[], Any]) -> list[Any]:
    """`function()` on every rank, forked from this process; their results in order."""

    def here(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=cluster.world, timeout=timedelta(seconds=600))
        found = function()
        dist.barrier()
        return found

    return cluster.fork(here)


def profiler() -> CollectiveProfiler:
    """On every rank: what measures its pairs of hosts."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_id())
    names = list(dict.fromkeys(hosts))
    members = tuple(tuple(rank for rank, host in enumerate(hosts) if host == name) for name in names)
    mesh = make_parallel_context(Plan(dp_replicate=dist.get_world_size()))
    return CollectiveProfiler(mesh, members)


def measure_pairs() -> list[LinkSample]:
    """On every rank: what is measured of pairs of hosts."""
    return profiler().pairs()


def look() -> tuple[str, float, list[LinkSample], list[float]]:
    """On every rank: its host, its quota, what is measured of pairs of hosts, and what their wires carry."""
    network = profiler()
    pairs = network.pairs()
    return host_id(), cgroup_cpu_quota(), pairs, [carried(network, pair) for pair in pairs]


def carried(network: CollectiveProfiler, pair: LinkSample) -> float:
    """Bytes/s of the fastest of several messages: whatever else runs makes one slower, and nothing makes it faster than
    its wire."""
    group, found = network.group((pair.first, pair.second)), 0.0
    for _ in range(TIMES):
        found = max(found, MESSAGE / network._pair(group, MESSAGE))
        if found > WIRE / 2:
            break
    return found


def test_emulated_nodes_have_the_requested_links_and_cpu_quotas() -> None:
    need_networks()
    with emulate_cluster(NODES) as cluster:
        found = on_ranks(cluster, look)
    hosts = [host for host, *_ in found]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert [share for _, share, *_ in found] == pytest.approx([0.6, 0.6, 0.3, 0.3])
    *_, pairs, rates = found[0]
    assert {(pair.first // 2, pair.second // 2) for pair in pairs} == {(0, 1)}
    assert all(0.5 * WIRE < rate < 1.2 * WIRE for rate in rates)


@pytest.mark.soak
def test_links_with_a_delay_are_as_late_and_as_wide_as_asked() -> None:
    """Through the relay: what one rank sends is with the other no sooner."""
    need_networks()
    with emulate_cluster(NODES._replace(delay=0.02)) as cluster:
        *_, pairs, rates = on_ranks(cluster, look)[0]
    assert min(pair.latency for pair in pairs) > 0.02
    assert all(0.5 * WIRE < rate < 1.2 * WIRE for rate in rates)


@pytest.mark.soak
def test_ranks_of_two_sites_meet_through_the_uplinks_of_their_sites() -> None:
    need_networks()
    sites = UplinkTier((0, 0, 1, 1), WIRE / 2, 0.05)
    four = ScaledCluster(shares=(0.4,) * 4, nodes=(0, 1, 2, 3), wires=(WIRE,) * 4, motion=1.0, tiers=(sites,))
    with emulate_cluster(four) as cluster:
        pairs = on_ranks(cluster, measure_pairs)[0]
    for pair in pairs:
        across = sites.blocks[pair.first] != sites.blocks[pair.second]
        assert (pair.latency > 0.05) == across, pair
        assert pair.bandwidth < (0.6 if across else 1.2) * WIRE, pair


@pytest.mark.parametrize("plan", ["dp2.pp2.z1.zbh1", "dp2.z1.mb2.ga3-1"])
def test_ranks_of_different_hosts_train_to_the_loss_of_one_device(ranks: Any, plan: str) -> None:
    check(
        alone("llama", "fp64", 2),
        ranks.run(parse_plan(plan).world, train_between_hosts, "llama", plan, "fp64", 2),
        "fp64",
    )


SLEEPERS = """
import os, signal, time
from bench.emulation.emulated_cluster import emulate_cluster, run_on_ranks
from bench.emulation.emulated_cluster import ScaledCluster
with emulate_cluster(ScaledCluster((0.5, 0.5), (0, 1), (1e6, 1e6), 1.0)) as cluster:
    run_on_ranks(cluster, ["sleep", "1234.5"], os.environ)
"""


def children(parent: int) -> list[int]:
    """Of an emulator, its ranks and what holds its networks."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == parent]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def lives(pid: int) -> bool:
    """One that has ended may wait for this process to ask for it, which adopts orphans while it has ranks of its
    own."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_emulator_leaves_no_process_and_the_next_one_removes_its_quotas() -> None:
    need_networks()
    process = subprocess.Popen([sys.executable, "-c", SLEEPERS])
    end = time.monotonic() + 600
    while len(children(process.pid)) < 5 and time.monotonic() < end:  # a switch, two nodes, two ranks
        time.sleep(0.02)
    sleepers = children(process.pid)
    assert len(sleepers) == 5
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(lives, sleepers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in sleepers if lives(pid)]
    assert permitted()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/meshwright-{process.pid}-*"))


def test_a_rank_that_is_forked_while_its_emulator_dies_ends_too() -> None:
    """It has not asked yet to die with it."""
    told, tell = os.pipe()
    emulator = os.fork()
    if emulator == 0:
        cluster, me = EmulatedCluster(NODES, None, None), os.getpid()  # type: ignore[arg-type]
        if os.fork() == 0:
            while os.getppid() == me:
                time.sleep(0.01)
            try:
                cluster.enter(0)
            finally:
                os.write(tell, b"lives")
                os._exit(0)
        os._exit(0)
    os.close(tell)
    os.waitpid(emulator, 0)
    with os.fdopen(told, "rb") as heard:
        assert heard.read() == b""


HEARERS = '''
import os, sys
from bench.emulation.emulated_cluster import emulate_cluster, run_on_ranks
from bench.emulation.emulated_cluster import ScaledCluster
SAVES = """  # not a shell's trap: a signal that comes while its command ends by itself is lost to it
import os, signal, subprocess, time
def save(*_):
    time.sleep(1)
    raise SystemExit(subprocess.run(["ip", "-o", "link", "show", "eth0"]).returncode)
signal.signal(signal.SIGINT, save)
os.write(1, b"ready")  # at once: a line that is printed may be two writes, between which the other child has its own
while True:
    time.sleep(0.05)
"""
with emulate_cluster(ScaledCluster((0.5, 0.5), (0, 1), (1e6, 1e6), 1.0)) as cluster:
    run_on_ranks(cluster, [sys.executable, "-c", SAVES], os.environ)
'''


def test_ctrl_c_keeps_the_network_of_an_emulated_cluster_until_ranks_have_saved() -> None:
    """A terminal sends it to the whole group: to whoever holds the networks, too."""
    need_networks()
    with subprocess.Popen(
        [sys.executable, "-c", HEARERS], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        late = Timer(600, process.kill)
        late.start()
        assert process.stdout.read(10) == 2 * "ready"
        os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
        late.cancel()
    assert said.count("eth0") == 2 and process.returncode == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "bench.emulation", "1x1:cpu+1x1:cpu@1Gb", "--", sys.executable)], ids=["own", "other"]
)
def test_trials_run_plans_one_after_the_other_and_train_begins_with_the_fastest(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """On ranks that the command starts, and on those of two nodes that another launcher has started."""
    if launcher:
        need_networks()
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(400)))
    (tmp_path / "job.yaml").write_text(JOB)
    command = [
        sys.executable,
        *launcher,
        "-m",
        "meshwright.cli.main",
        "train",
        "job.yaml",
        "--folder",
        "runs/tried",
        "--trials",
        "3",
    ]
    environment = {
        **os.environ,
        "MESHWRIGHT_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^trial  (\S+): ([0-9.]+) (us|ms|s) a step", done.stderr, re.MULTILINE)
    tried = {name: float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] for name, number, unit in said}
    assert 2 <= len(tried) <= 3
    assert [
        name
        for name, seconds in tried.items()
        if seconds == min(tried.values()) and f"plan {name}, as requested" in done.stderr
    ]
