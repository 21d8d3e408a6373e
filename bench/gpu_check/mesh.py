"""Part E, mesh: trains under 44 plans on up to 8 ranks over NCCL, and compares losses, gradients and weights with plain
PyTorch on the CPU. The models and tolerances are those of tests/ranks/equality.py. On a machine with one device, all
ranks share it, which NCCL 2.30 and later support; MESHWRIGHT_NCCL names a library to use instead of torch's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from bench.gpu_check.common import Bench, Findings

from meshwright.core.errors import InputError
from meshwright.core.units import show_seconds
from meshwright.spec.plan import parse_plan

TESTS = Path(__file__).parents[2] / "tests"
PLANS = (
    ("llama", "dp1"), ("llama", "dp2"), ("llama", "dp2.z1"), ("llama", "dp2.z2"), ("llama", "dp2.z3"),
    ("llama", "dp2x2.z3.mb2"), ("llama", "dp4.z3.rc-full"), ("llama", "tp2.mb4"), ("llama", "tp2.sp.mb4"),
    ("llama", "tp4.sp.mb4.rc-full"), ("llama", "pp2"), ("llama", "pp4"), ("llama", "pp2.gpipe"),
    ("llama", "pp2.interleaved2"), ("llama", "pp2.zbh1"), ("llama", "pp2.zbv"), ("llama", "pp2.dualpipev"),
    ("llama", "cp2.mb4"), ("llama", "cp4.ulysses"), ("llama", "dp2.cp2.z2.mb2"), ("llama", "tp2.sp.cp2.ulysses.mb2"),
    ("llama", "dp2.tp2.sp.z3.mb2"), ("llama", "dp2.pp2.z3"), ("llama", "tp2.sp.pp2.mb2"),
    ("llama", "dp2.z3.off-optimizer.off-gradients.off-parameters"), ("llama", "dp2.z1.off-activations"),
    ("llama-tied", "dp2.pp2.z3"), ("gpt2", "tp2.sp.mb4"), ("gpt2", "dp2.z2.mb2"), ("bert", "tp2.pp2.z2.mb2"),
    ("convnet", "dp2.z1"), ("hf-llama", "tp2.sp.pp2.mb2"), ("hf-gpt2", "dp2.pp2.z3"),
    ("mixture", "dp2.ep2.z1"), ("mixture", "tp2.sp.ep2.mb2"), ("mixtral", "dp2.ep2.z2"),
    ("llama", "dp2.tp2.sp.pp2.z1.mb2"), ("llama", "dp2.tp2.pp2.z3.mb2.rc-full"), ("llama", "cp8.z1"),
    ("mixture", "dp2.tp2.ep4.z3.mb2"),
    ("llama", "tp2.sp.mb4.compile"), ("llama", "dp2.z3.mb2.compile"), ("llama", "cp2.mb4.compile"),
    ("llama", "pp2.mb2.compile"),
)  # fmt: skip
"""Each parallel axis alone, their pairs, each pipeline schedule, offload, eight ranks, and compiled blocks last."""

LIMIT, COMPILED_LIMIT = 45.0, 150.0
"""Time limits in seconds of a plan, and of one whose blocks are compiled."""

ALONE = Lock()
"""Locked while this process trains on one device: threads share torch's random state and default dtype."""

EQUAL_PLANS_GOAL = 20
MOST_RANKS, SHARING_NCCL = 8, (2, 30)
SHARED_DEVICE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""What NCCL needs for ranks that share one device."""


@contextmanager
def shared_scheduler() -> Iterator[bool]:
    """Starts CUDA's multi-process service, if this machine has it, and ends it. Without it, the device runs one
    process at a time: a collective of eight ranks takes 126 ms instead of 0.05 ms (H100). Yields whether it runs."""
    program = shutil.which("nvidia-cuda-mps-control") or "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
    if not Path(program).is_file() or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([program, "-d"], capture_output=True, timeout=30).returncode == 0
        if not started:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
        try:
            yield started
        finally:
            if started:
                subprocess.run([program], input=b"quit -t 5\n", capture_output=True, timeout=30)


def prepare(bench: Bench) -> None:
    """Sets the environment of the ranks, which are new processes on CUDA, and forks of this one on the CPU.

    Raises: InputError if ranks must share a device and NCCL is too old for it."""
    sys.path[:0] = [str(TESTS), str(TESTS / "ranks")]
    os.environ |= {"MESHWRIGHT_MEASURED": "0", "MESHWRIGHT_PROVE": "never", "OMP_NUM_THREADS": "1"}
    if bench.tiny:
        return
    os.environ["MESHWRIGHT_TEST_DEVICE"] = "cuda"
    if torch.cuda.device_count() >= MOST_RANKS:
        return
    for name, value in SHARED_DEVICE.items():
        os.environ.setdefault(name, value)
    own = torch.cuda.nccl.version()
    if own < SHARING_NCCL and not os.environ.get("MESHWRIGHT_NCCL"):
        raise InputError(
            f"part E needs {MOST_RANKS} devices, or NCCL {'.'.join(map(str, SHARING_NCCL))} for ranks that share one; "
            f"torch has NCCL {'.'.join(map(str, own))}: set MESHWRIGHT_NCCL to the libnccl.so.2 of a later one"
        )


def run(bench: Bench, plans: tuple[tuple[str, str], ...] = PLANS) -> Findings:
    found = Findings()
    prepare(bench)
    with nullcontext(False) if bench.tiny else shared_scheduler() as service:
        compare(bench, found, plans, 0.8 * bench.limit)
    found.data["multi_process_service"] = service
    return found


def attempt(model: str, plan: str) -> dict[str, Any] | str:
    """On every rank: the results of training under `plan`, or the traceback of what a rank raised. Ranks that raise
    stay alive: a client that is killed leaves CUDA's multi-process service unusable."""
    from equality import train  # type: ignore[import-not-found]

    try:
        found: dict[str, Any] = train(model, plan, "fp64", 2)
        return found
    except Exception:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return traceback.format_exc()


def compare_one(pool: Any, model: str, plan: str) -> dict[str, Any]:
    """Compares one plan with one device. Returns its row: relative differences of losses and gradients, or an error."""
    from equality import alone, check

    began, row = time.monotonic(), {"name": f"{model} {plan}"}
    limit = COMPILED_LIMIT if "compile" in plan else LIMIT
    try:
        results = pool.run(parse_plan(plan).world, attempt, model, plan, timeout=limit)
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            return row | {"error": failed[0][-3000:]}
        with ALONE:
            reference = alone(model, "fp64", 2)
        loss, gradient = check(reference, results, "fp64")
    except Exception as error:
        return row | {"error": str(error)[-3000:]}
    return row | {"loss": loss, "gradient": gradient, "seconds": time.monotonic() - began}


def compare(bench: Bench, found: Findings, plans: tuple[tuple[str, str], ...], seconds: float) -> None:
    """Runs `plans` for at most about `seconds`, two at a time, and adds the claims and the figures to `found`."""
    from pool import Pool  # type: ignore[import-not-found]

    until = time.monotonic() + seconds

    def work(mine: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
        pool, rows = Pool(), []
        try:
            for model, plan in mine:
                late = time.monotonic() > until
                row = {"name": f"{model} {plan}", "skipped": True} if late else compare_one(pool, model, plan)
                rows.append(row)
                print(f"  {row}"[:1500], file=sys.stderr, flush=True)
        finally:
            pool.close()
        return rows

    sides = 1 if bench.tiny else 2
    plans = (("mixture", "dp2.tp2.ep4.z3.mb2"), *plans[:2]) if bench.tiny else plans
    with ThreadPoolExecutor(sides) as threads:
        rows = [row for part in threads.map(work, [plans[side::sides] for side in range(sides)]) for row in part]
    found.data["plans"] = rows
    equal = [row for row in rows if "loss" in row]
    skipped = sum("skipped" in row for row in rows)
    worst = max((max(row["loss"], row["gradient"]) for row in equal), default=0.0)
    library = "gloo" if bench.tiny else "NCCL"
    found.claim(
        f"at least {EQUAL_PLANS_GOAL} plans over {library} equal to one device in float64 within 1e-10",
        f"{len(equal)} of {len(rows) - skipped} plans, largest relative difference {worst:.1e}"
        + (f"; {skipped} not run in {show_seconds(seconds)}" if skipped else ""),
        bench.tiny or len(equal) >= EQUAL_PLANS_GOAL,
    )
    for row in rows:
        if "error" in row:
            found.claim(f"{row['name']}: equal to one device", row["error"].strip().splitlines()[-1], False)


def main() -> None:
    """`python -m bench.gpu_check.mesh MODEL:PLAN ...`: these plans alone."""
    plans = tuple((text.partition(":")[0], text.partition(":")[2]) for text in sys.argv[1:]) or PLANS
    for claim in run(Bench(torch.device("cuda", 0), "local:1"), plans).claims:
        print(f"{claim.text}: {claim.figure} [{claim.verdict}]", flush=True)


if __name__ == "__main__":
    main()
