"""A rank is killed: how long until the next new step, and how many steps are run again, beside torchrun's restart of
torch DDP.

Each round kills one rank of each at a random step, one after the other, on the same model, batch and number of ranks.
The clock runs from kill -9 until the second step
behind the last one recorded before is recorded (the first may have ended as the kill came); steps are lost that were
recorded and are run again. torchrun restarts with a store of its own for each attempt
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; with its default most restarts fail on gloo) and saves every 10 steps. torchft
keeps replica groups of one rank (bench/tolerant.py; a group that died
is started anew at once): those that are left go on with fewer rows a step, so that its steps after a kill are not those
of the undisturbed run; `--torchft PYTHON` names a Python that has it.
torchft 0.2.0 with torch 2.13: where the sum fails before its hook holds a future, the group that is left ends too
(AssertionError in torchft/ddp.py), and both begin at step 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.peers import machine

STEPS, EVERY, ROWS, SEQUENCE = 10_000, 10, 8, 64
HERE = Path(__file__).parent
LIMIT = 300.0
SIZES = {
    "kind": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 128,
    "vocab": 258,
    "seq": SEQUENCE,
}


def environment() -> dict[str, str]:
    more = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**os.environ, **more, "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE.parent}"}


def ours(folder: Path, ranks: int) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
    sizes = json.dumps({name: value for name, value in SIZES.items() if name != "kind"})
    sets = {
        "model.sizes": sizes, "workload.sequence": SEQUENCE, "workload.batch": ROWS, "workload.precision": "fp32",
        "data.source": text, "data.tokenizer": "bytes", "run.folder": folder, "run.checkpoint_every": EVERY,
        "run.evaluate_every": 0,
    }  # fmt: skip
    words = [f"--set={name}={value}" for name, value in sets.items()]
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "train",
        "--model",
        "llama-tiny",
        "--cluster",
        f"local:{ranks}",
    ]
    return [*command, "--plan", f"dp{ranks}", "--steps", str(STEPS), *words]


def torchrun(folder: Path, ranks: int) -> list[str]:
    what = [str(HERE / "restarted.py"), str(folder), json.dumps(SIZES), *map(str, (STEPS, EVERY, ROWS, SEQUENCE))]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=9",
        *what,
    ]


def torchft(folder: Path, ranks: int, python: str) -> list[str]:
    return [
        python,
        str(HERE / "tolerant.py"),
        str(folder),
        json.dumps(SIZES),
        *map(str, (STEPS, ROWS, SEQUENCE, ranks)),
    ]


def is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        torch = any("restarted.py" in word for word in words[1:3]) or (
            "tolerant.py" in " ".join(words[1:2]) and len(words) == 9
        )
        return torch or process.name().startswith("mesh-rank")
    except psutil.Error:
        return False


def last_record(records: Path) -> dict[str, Any]:
    """Of the last line that is whole."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return dict(json.loads(records.read_bytes().split(b"\n")[-2]))
    return {}


def last_step(records: Path) -> int:
    return int(last_record(records).get("step", 0))


def until(parent: subprocess.Popen[bytes], records: Path, condition: Any) -> None:
    end = time.monotonic() + LIMIT
    while not condition(last_step(records)):
        if time.monotonic() > end or parent.poll() is not None:
            raise RuntimeError(f"no new step: {(records.parent / 'log.txt').read_text()[-500:]}")
        time.sleep(0.002)


def once(command: list[str], folder: Path, all_: int, kills: int, chance: random.Random) -> list[dict[str, float]]:
    """A run in which `kills` ranks are killed, one after the other."""
    records, found = folder / "records.jsonl", []
    with (folder / "log.txt").open("wb") as log:
        parent = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(kills):
            begin = last_step(records)
            wait = EVERY + chance.randrange(EVERY)
            until(parent, records, lambda step, begin=begin, wait=wait: step >= begin + wait)
            until(
                parent, records, lambda step: last_record(records).get("groups", all_) == all_
            )  # one that was killed is back
            ranks = [child for child in psutil.Process(parent.pid).children(recursive=True) if is_rank(child)]
            before, size = last_step(records), len(records.read_bytes())
            began = time.monotonic()
            chance.choice(ranks).send_signal(signal.SIGKILL)
            until(parent, records, lambda step, before=before: step > before + 1)
            seconds = time.monotonic() - began
            again = [json.loads(line)["step"] for line in records.read_bytes()[size:].split(b"\n")[:-1]]
            found.append({"seconds": seconds, "lost": float(sum(step <= before for step in again))})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--results", default="recovery")
    parser.add_argument("--torchft", default="", help="a Python that has torchft beside torch")
    given = parser.parse_args(arguments)
    chance = random.Random(0)
    systems: dict[str, Callable[[Path, int], list[str]]] = {"meshwright": ours, "torchrun": torchrun}
    if given.torchft:
        systems["torchft"] = partial(torchft, python=given.torchft)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _ in range(given.rounds):
        for name, command in systems.items():
            with tempfile.TemporaryDirectory(
                ignore_cleanup_errors=True
            ) as place:  # ranks that were killed may still write
                found[name] += once(command(Path(place), given.ranks), Path(place), given.ranks, given.kills, chance)
    lines = [
        "| system | kills | to the next new step, median | largest | steps run again, median | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, kills in found.items():
        seconds, lost = [kill["seconds"] for kill in kills], [kill["lost"] for kill in kills]
        lines.append(
            f"| {name} | {len(kills)} | {median(seconds):.2f} s | {max(seconds):.2f} s | {median(lost):.0f} | "
            f"{max(lost):.0f} |"
        )
    load = f"{os.getloadavg()[0]:.0f}"
    about = (
        f"# A killed rank, beside torchrun and torchft\n\n{(__doc__ or '').strip()}\n\n{given.ranks} ranks, plan "
        f"dp{given.ranks}; load of the machine at the end: {load}.\n"
    )
    text = about + "\n" + "\n".join(lines) + "\n"
    results = HERE / "results" / given.results
    results.with_suffix(".md").write_text(text)
    results.with_suffix(".json").write_text(
        json.dumps({"machine": machine(), "load": float(load), "ranks": given.ranks, "kills": found}, indent=1) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
