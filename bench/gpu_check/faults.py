"""Part F, faults: checks that a trainer that loads a checkpoint has the losses of an uninterrupted run, and that
`meshwright train` trains on one device, continues from its checkpoint, traces the memory of a step, and recovers a rank
that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from bench.gpu_check.common import MEMORY_TOLERANCE, TINY, Bench, Findings, build_model, first_line, make_batch

import meshwright as mw
from meshwright.core.errors import InputError
from meshwright.core.units import show_bytes, show_seconds
from meshwright.report.memory import read_timelines

RESUMED_PLANS = (("dp1", True, False), ("dp1", None, False), ("dp1", True, True), ("dp1.off-optimizer50", True, False))
"""Plans under which a run continues, with whether the optimizer uses fused kernels and whether sums are exact. The last
one, which offloads half of the states, is for CUDA only."""

LOSS_TOLERANCE = 1e-5
"""Relative difference of losses in float32: an embedding's gradient is summed in any order on a device."""

KILL_AT, STEPS = 10, 60
LIMIT = 240.0


def saved_and_loaded(plan: str, fused: bool | None, exact: bool) -> tuple[list[float], list[float]]:
    """The losses of steps 2 to 4, without an interruption and from a checkpoint."""
    batch, kind = make_batch(TINY, 4), mw.recipe("fp32").but(exact=exact)

    def make() -> Any:
        return mw.parallelize(
            build_model(TINY),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused),
            plan=plan,
            precision=kind,
        )

    try:
        first = make()
        first.step(batch)
        with tempfile.TemporaryDirectory() as folder:
            path = first.save(folder)
            through = [first.step(batch).loss for _ in range(3)]
            second = make()
            second.load(path)
        return through, [second.step(batch).loss for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)  # exact sums enable them


def check_saves(found: Findings, tiny: bool) -> None:
    for plan, fused, exact in RESUMED_PLANS[:3] if tiny else RESUMED_PLANS:
        name = f"{plan}{', exact' if exact else ''}{', fused' if fused else ''}: continues from a checkpoint"
        try:
            through, again = saved_and_loaded(plan, fused, exact)
        except Exception as error:  # an error of one plan must not prevent the others
            found.claim(name, first_line(error), False)
            continue
        apart = max(abs(one / other - 1) for one, other in zip(again, through, strict=True))
        found.claim(name, f"losses {apart:.1e} apart", apart <= LOSS_TOLERANCE)


def train_command(bench: Bench, folder: Path, steps: int, *more: str) -> list[str]:
    device, precision = ("local:1", "fp32") if bench.tiny else (bench.cluster_name, "bf16")
    job = ["--model", "llama-tiny", "--seq", "128", "--batch", "8", "--cluster", device, "--precision", precision]
    return [sys.executable, "-m", "meshwright", "train", *job, "--run", str(folder), "--steps", str(steps), *more]


def records_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "records.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.is_file() else []


def check_command(found: Findings, bench: Bench, folder: Path) -> None:
    """Four steps with trials of plans before them, then four more from the checkpoint."""
    for steps, more in ((4, ["--trials", "2"]), (8, [])):
        done = subprocess.run(train_command(bench, folder, steps, *more), capture_output=True, text=True)
        said = " / ".join([line for line in done.stderr.splitlines() if line.strip()][-2:])
        name = f"train --steps {steps} {' '.join(more)}".strip()
        recorded = [record["step"] for record in records_of(folder)]
        met = done.returncode == 0 and recorded == list(range(steps + 1))
        found.claim(f"{name}: every step once", said if done.returncode else f"steps {recorded}", met)
        if not met:
            return
    records = records_of(folder)
    first, last = records[1]["loss"], records[-1]["loss"]
    found.claim("train: the loss falls", f"{first:.4f} to {last:.4f}", last < first)
    try:
        (timeline,) = read_timelines(folder)
    except InputError as error:
        found.claim("train: the memory of a step is traced", str(error), False)
        return
    counted = {record["step"]: record["memory"] for record in records}[timeline.step]["total"]
    near = abs(timeline.total / counted - 1) <= MEMORY_TOLERANCE
    figure = f"{show_bytes(timeline.total)}, the device counts {show_bytes(counted)}"
    found.claim(f"train: traced memory within {MEMORY_TOLERANCE:.0%} of the device's count", figure, near)


def check_kill(found: Findings, bench: Bench, folder: Path) -> None:
    """Kills the rank with SIGKILL after KILL_AT steps; the run must end with the losses of an undisturbed run."""
    calm = folder / "calm"
    subprocess.run(train_command(bench, calm, STEPS), capture_output=True, timeout=LIMIT)
    run = subprocess.Popen(
        train_command(bench, folder / "killed", STEPS), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + LIMIT
        while len(records_of(folder / "killed")) <= KILL_AT and run.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        ranks = [child for child in children if child.name().startswith("mesh-rank")]
        at = len(records_of(folder / "killed")) - 1
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        killed, again = time.monotonic(), None
        while run.poll() is None and time.monotonic() < until:
            if again is None and len(records_of(folder / "killed")) > at + 2:
                again = time.monotonic() - killed
            time.sleep(0.02)
        said = run.stderr.read() if run.stderr and run.poll() is not None else ""
    finally:
        run.kill()
    one, other = ([record["loss"] for record in records_of(folder / name)][1:] for name in ("calm", "killed"))
    complete = bool(ranks) and run.returncode == 0 and len(one) == len(other) == STEPS
    apart = max((abs(a / b - 1) for a, b in zip(one, other, strict=False)), default=1.0)
    figure = f"killed at step {at}, next step after {show_seconds(again)}, losses {apart:.1e} apart" if again else ""
    met = complete and apart <= LOSS_TOLERANCE * (1 if bench.tiny else 1000)
    found.data["killed"] = {"step": at, "recovery": again, "apart": apart}
    found.claim(
        "train: a killed rank recovers, and the losses are those of a run without the kill", figure or said[-300:], met
    )


def run(bench: Bench) -> Findings:
    found = Findings()
    check_saves(found, bench.tiny)
    found.save()
    if not bench.tiny:
        torch.cuda.empty_cache()  # the commands share the device with this process
    with tempfile.TemporaryDirectory() as folder:
        check_command(found, bench, Path(folder, "run"))
        found.save()
        check_kill(found, bench, Path(folder))
    return found
