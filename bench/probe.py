"""What `meshwright probe` takes, how well it repeats itself, and whether it finds the tiers of a shaped cluster.

    python -m bench probe              this machine's ranks, and 2x2 ranks of an emulated cluster, each twice, about 80
    s; Linux, root for the second

Through the command line, as a user would. A figure repeats itself by the larger of two over the smaller, less 1; goals:
10 %, and 20 s a probe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "probe.md"
OURS = [sys.executable, "-m", "meshwright.cli.main"]
PROBES = {
    "this machine, 4 ranks": [*OURS, "probe", "--cluster", "local:4", "--json"],
    "2x2 ranks, 1 Gbit/s between nodes": [
        sys.executable,
        "-m",
        "bench.emulation",
        "2x2:cpu@1Gb",
        "--",
        *OURS,
        "probe",
        "--cluster",
        "2x2:cpu@1Gb",
        "--json",
    ],
}


def probed(command: list[str]) -> dict[str, Any]:
    """What the command says. RuntimeError with its last words where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return dict(json.loads(done.stdout))


def figures(cluster: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a measured cluster, in SI units."""
    for at, group in enumerate(cluster["groups"]):
        device, link, of = group["device"], group["link"], f" of group {at}" if at else ""
        yield f"products fp32{of}, FLOP/s", device["peak"]["fp32"]
        yield f"memory{of}, B/s", device["bandwidth"]
        yield f"operation{of}, s", device["launch"]
        yield f"link inside{of}, B/s", link["bandwidth"]
        yield f"latency inside{of}, s", link["latency"]
    if len(cluster["groups"]) > 1 or cluster["groups"][0]["nodes"] > 1:
        yield "network, B/s", cluster["network"]["bandwidth"]
        yield "latency of the network, s", cluster["network"]["latency"]


def table(name: str, first: dict[str, Any], again: dict[str, Any]) -> Iterator[str]:
    took, busy = ([each["measured"][key] for each in (first, again)] for key in ("seconds", "busy"))
    nodes = "+".join(f"{group['nodes']}x{group['devices']}" for group in again["cluster"]["groups"])
    yield from (
        f"## {name}",
        "",
        f"{took[0]:.1f} and {took[1]:.1f} s; others kept {busy[0]:.2f} and {busy[1]:.2f} processors busy; found "
        f"{nodes}.",
    )
    yield from (f"Odd: {line}." for line in dict.fromkeys((*first["odd"], *again["odd"])))
    yield from ("", "| figure | first | again | apart |", "|---|---|---|---|")
    for (what, one), (_, other) in zip(figures(first["cluster"]), figures(again["cluster"]), strict=False):
        yield f"| {what} | {one:.3g} | {other:.3g} | {max(one, other) / min(one, other) - 1.0:.0%} |"
    yield ""


def main(words: list[str]) -> None:
    if words:
        sys.exit(f"bench probe: takes no options, not {' '.join(words)!r}")
    lines = [
        "# Probe, twice",
        "",
        f"`python -m bench probe`, {time.strftime('%d %B %Y')}. Goals: figures within 10 %, at most 20 s.",
        "",
    ]
    for name, command in PROBES.items():
        try:
            lines += table(name, probed(command), probed(command))
        except RuntimeError as error:
            lines += [f"## {name}", "", f"Not measured: {error}", ""]
    RESULTS.write_text("\n".join(lines), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
