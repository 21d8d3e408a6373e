"""`make gpu-check`: measures a CUDA device in six parts, and compares the results with the planner's estimates.

    A device    matrix products, attention, memory, copies, and the result of `meshwright probe`
    B training  layers of Llama 3 8B, eager and compiled: MFU, step time and memory
    C memory    plans that save memory: bytes, peaks and losses
    D options   the first loss in float32, offloaded activations, fp8, packed documents
    E mesh      2 to 8 ranks over NCCL, every plan compared with one device
    F faults    training that is killed and resumed

    make gpu-check                       # all parts
    make gpu-check ARGS="--parts E,B,A"  # some of them, in this order
    make gpu-check ARGS=--mesh           # part E alone
    make gpu-check ARGS=--again          # also parts that have results of this device and this version
    make gpu-check ARGS=--cpu            # runs the same programs on the CPU with a tiny model, to test the programs

Each part runs in a process of its own, for at most 10 minutes, prints claims with figures and verdicts, and writes
bench/results/gpu/<part>.json; bench/results/gpu.md is the table of all. A part that has results is skipped, so an
interrupted check can be continued. On fewer than 8 devices part E needs NCCL 2.30 or later. MESHWRIGHT_NCCL names the
file libnccl.so.2 of a later version than torch's. Exit codes: 0 all required claims are met, 1 one is missed, 2 no
device or bad input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench.gpu_check.common import RESULTS, Bench, Claim

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.version import __version__

PARTS = {"A": "device", "B": "training", "C": "memory", "D": "options", "E": "mesh", "F": "faults"}
LIMIT = 600.0
"""Seconds that a part may take."""


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="A,B,C,D,E,F", help="letters with commas between, run in this order")
    parser.add_argument("--mesh", action="store_true", help="part E alone")
    parser.add_argument("--cluster", default="local:1", help="the device by its name in the catalog, such as 1x1:h100")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each training run")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that each part may take")
    parser.add_argument("--again", action="store_true", help="run parts that have results of this device and version")
    parser.add_argument("--cpu", action="store_true", help="the same programs on the CPU with a tiny model")
    parser.add_argument("--skip-without-cuda", action="store_true", help="exit code 0 without a CUDA device")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # the part that this process runs
    return parser.parse_args(arguments)


def run_part(options: argparse.Namespace) -> None:
    """Runs the part `options.one` in this process. Its findings go to the file `MESHWRIGHT_PART_FILE`."""
    part = importlib.import_module(f"bench.gpu_check.{PARTS[options.one]}")
    device = torch.device("cpu" if options.cpu else "cuda:0")
    if options.one != "E":  # the ranks of part E start the driver themselves
        from meshwright.runtime.backend import init_local_device

        device = init_local_device()
    bench = Bench(device, "1x1:cpu" if options.cpu else options.cluster, options.cpu, options.steps, options.limit)
    part.run(bench).save()


def start_part(letter: str, options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Runs a part in a process of its own. Returns its claims and data. A part that fails has one missed claim."""
    environment = dict(os.environ)
    if letter == "E" and (library := os.environ.get("MESHWRIGHT_NCCL")):
        environment["LD_PRELOAD"] = library
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "findings.json")
        environment["MESHWRIGHT_PART_FILE"] = str(file)
        command = [sys.executable, "-m", "bench.gpu_check", *arguments, "--one", letter]
        try:
            code = subprocess.run(command, env=environment, timeout=options.limit).returncode
            why = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = 1, f"did not end in {options.limit:.0f} s"
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"claims": [], "data": {}}
    if code:
        found["claims"].append(asdict(Claim(f"part {letter} ({PARTS[letter]}) ends", why, False)))
    return found


def device_name(options: argparse.Namespace) -> str | None:
    """The name of the device. None, after one line, if there is none and --skip-without-cuda is set.

    Raises: InputError if there is no CUDA device."""
    if options.cpu:
        return "the CPU"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    built = "built without CUDA" if torch.version.cuda is None else "built with CUDA, but the driver shows no device"
    if options.skip_without_cuda:
        print(f"gpu-check: skipped: no CUDA device (torch {torch.__version__} is {built})", file=sys.stderr)
        return None
    raise InputError(
        f"no CUDA device: torch {torch.__version__} is {built}; --skip-without-cuda makes this no error, --cpu runs "
        "the programs on the CPU"
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = options_of(arguments)
    if options.one:
        run_part(options)
        return 0
    letters = ["E"] if options.mesh else [letter.strip().upper() for letter in options.parts.split(",")]
    if unknown := [letter for letter in letters if letter not in PARTS]:
        raise InputError(f"--parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    name = device_name(options)
    if name is None:
        return 0
    folder = Path(tempfile.mkdtemp()) if options.cpu else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    missed = 0
    for letter in letters:
        file = folder / f"{PARTS[letter]}.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        same = (known.get("device"), known.get("version"), known.get("torch")) == (name, __version__, torch.__version__)
        began = time.monotonic()
        if not same or options.again:
            print(f"\n{letter} {PARTS[letter]}: running", file=sys.stderr, flush=True)
            known = {"device": name, "version": __version__, "torch": torch.__version__}
            known |= start_part(letter, options, arguments) | {"seconds": time.monotonic() - began}
            file.write_text(json.dumps(known, indent=1) + "\n")
        claims = [Claim(**claim) for claim in known["claims"]]
        print(f"\n{letter} {PARTS[letter]} on {name}, {known['seconds']:.0f} s{', from earlier' if same else ''}")
        for claim in claims:
            print(f"  {claim.verdict:14} {claim.text}: {claim.figure}", flush=True)
        missed += sum(claim.met is False and claim.required for claim in claims)
    if not options.cpu:
        write_table(folder)
    print(f"\ngpu-check: {missed} required claims are missed" if missed else "\ngpu-check: all required claims are met")
    return 1 if missed else 0


def write_table(folder: Path) -> None:
    """Writes bench/results/gpu.md from the results of all parts."""
    lines = ["# One CUDA device", "", "`make gpu-check`; the figures behind it are in gpu/*.json.", ""]
    for letter, part in PARTS.items():
        file = folder / f"{part}.json"
        if not file.is_file():
            continue
        known = json.loads(file.read_text())
        lines += [f"## {letter} {part}: {known['device']}, torch {known['torch']}, {known['seconds']:.0f} s", ""]
        lines += ["| claim | figure | verdict |", "|---|---|---|"]
        for claim in (Claim(**claim) for claim in known["claims"]):
            lines.append(f"| {claim.text} | {claim.figure} | {claim.verdict} |")
        lines.append("")
    (folder.parent / "gpu.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeshwrightError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        sys.exit(2)
