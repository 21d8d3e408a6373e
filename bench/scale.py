"""What the control plane takes as nodes become more: bytes of a start, files of a supervisor, time and memory of the
leader.

python -m bench.scale               # writes bench/results/scale.md

The leader and all supervisors are the real ones; ranks, links and clocks are simulated in this process
(tests/unit/virtual_cluster.py). So the leader's share of a core leaves out what the system takes to carry its lines.
The memory of the leader is that of the objects that its supervisor and agent reach, added to the memory of a process
with the same modules.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from virtual_cluster import Cluster

BEFORE = {8: (41_000, 66), 32: (107_000, 258), 128: (373_000, 1026)}
"""Nodes of 8 ranks: bytes that a node got at a start after a fault, and files that every supervisor opened for it, at
commit 5355fc1, by the same payload."""

HEAD = """# What the control plane takes at scale

Nodes of 8 ranks, one rank of which dies; then all ranks start again from their copies in memory. By `python -m \
bench.scale`: the real leader and
supervisors, simulated ranks and links. The share of a core is that of steps of 2 s, with a round of mirrors in each. \
"Before" is commit 5355fc1, which told every rank where the copies of every rank lie (1,024 ranks: 47 MB in all, 7 s).

| nodes | ranks | bytes to a node from fault to training | before | longest line | files for copies, most of any \
supervisor | before | leader, share of a core | leader, memory | memory of the whole simulation |
|---|---|---|---|---|---|---|---|---|---|
"""


LEFT_OUT = (type, types.ModuleType, types.FunctionType, types.MethodType, types.FrameType)


def reached_bytes(*roots: Any) -> int:
    """Returns the bytes of all objects that `roots` reach, without code and without objects of the simulation."""
    seen, waiting, found = {id(root) for root in roots}, list(roots), 0
    while waiting:
        one = waiting.pop()
        found += sys.getsizeof(one)
        for other in gc.get_referents(one):
            simulated = type(other).__module__.startswith("virtual_")
            if id(other) not in seen and not simulated and not isinstance(other, LEFT_OUT):
                seen.add(id(other))
                waiting.append(other)
    return found


class WeighedCluster(Cluster):
    """Notes the largest size of the leader's objects in healthy steps, in bytes."""

    weight = 0

    def _go_on(self) -> None:
        if self.healthy == 4:
            self.weight = max(self.weight, reached_bytes(self.leader, self.supervisor))
        super()._go_on()


def peak_mib() -> float:
    """Returns the largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row(nodes: int, folder: Path, modules: float) -> str:
    """Returns a row of the table. The share of a core is that of two steps of 2 s in which all is well, with a round of
    mirrors in each; of longer steps it is less. `modules`: MiB of this process before the first row."""
    cluster = WeighedCluster(folder, nodes, kinds=("dies",), step=2.0)
    cluster.train()
    supervisors = [cluster.leader_files.most, *(host.most for host in cluster.hosts.values())]
    seconds, spent = (sum(values) for values in zip(*cluster.steady, strict=True))
    longest = max(host.ours.largest for host in cluster.hosts.values())
    memory = peak_mib()
    before = [f"{value:,}" for value in BEFORE.get(nodes, ())] or ["", ""]
    return (
        f"| {nodes:,} | {8 * nodes:,} | {max(cluster.starts):,} | {before[0]} | {longest:,} | {max(supervisors)} | "
        f"{before[1]} | {100 * spent / seconds:.1f} % | {modules + cluster.weight / 2**20:,.0f} MiB | "
        f"{memory:,.0f} MiB |\n"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 256, 1024])
    nodes = parser.parse_args(arguments).nodes
    text, modules = HEAD, peak_mib()
    for count in nodes:
        with tempfile.TemporaryDirectory() as folder:
            text += row(count, Path(folder), modules)
        print(text.splitlines()[-1], flush=True)
        (Path(__file__).parent / "results" / "scale.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
