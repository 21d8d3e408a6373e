"""Trains the small default model while ranks of it are killed at random, and shows that it ends where an undisturbed
run ends.

    python examples/kill_ranks.py [--steps 60] [--ranks 4] [--every 3]

Both runs lie in runs/kill-ranks-*; `meshwright report runs/kill-ranks-killed` tells what happened.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def command(run: str, steps: int, ranks: int) -> list[str]:
    train = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "train",
        "--cluster",
        f"local:{ranks}",
        "--steps",
        str(steps),
        "--batch",
        "8",
    ]
    return [*train, "--seq", "64", "--run", run, "--set", "run.checkpoint_every=0", "--set", "run.evaluate_every=0"]


def ranks_of(parent: int) -> list[int]:
    """The processes of the ranks: children of the children of `parent`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            above = int((Path("/proc") / rest.split()[1] / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if "mesh-rank-" in name and above == parent:
            found.append(int(folder.name))
    return found


def reported(run: Path) -> int:
    """Lines of records: steps that have ended."""
    records = run / "records.jsonl"
    return records.read_bytes().count(b"\n") if records.exists() else 0


def digest(run: Path) -> str:
    """Of everything that the last checkpoint holds."""
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    files = sorted(newest.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes().partition(b"model/")[2] for file in files)).hexdigest()[:16]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument(
        "--every", type=float, default=3.0, help="seconds between kills; a step ends between two in any case"
    )
    chosen = options.parse_args()
    whole, killed = Path("runs/kill-ranks-whole"), Path("runs/kill-ranks-killed")
    for run in (whole, killed):
        if run.exists():
            sys.exit(f"{run} is there from an earlier time: remove it first")
    if subprocess.run(command(str(whole), chosen.steps, chosen.ranks)).returncode:
        sys.exit("the undisturbed run failed")
    training = subprocess.Popen(command(str(killed), chosen.steps, chosen.ranks))
    kills, before, chance = 0, 1, random.Random(1)
    while training.poll() is None:
        time.sleep(chosen.every * chance.uniform(0.5, 1.5))
        ranks, steps = ranks_of(training.pid), reported(killed)
        if ranks and steps > before:
            before = steps
            victim = chance.choice(ranks)
            print(f"kill -9 {victim}", file=sys.stderr)
            os.kill(victim, signal.SIGKILL)
            kills += 1
    if training.returncode:
        sys.exit(f"{kills} ranks killed; the run failed")
    same = digest(whole) == digest(killed)
    print(
        f"{kills} ranks killed; weights and optimizer of both runs: {digest(whole)} and {digest(killed)}, "
        f"{'equal' if same else 'DIFFERENT'}"
    )
    sys.exit(not same)


if __name__ == "__main__":
    main()
