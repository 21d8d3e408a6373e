"""One CUDA device: the loss of plain PyTorch, then a Llama-style model trained in bf16 as the planner says, measured beside predicted.

    python bench/gpu_check.py                          # or: make gpu-check
    python bench/gpu_check.py --cluster 1x1:a100-80gb  # a device that the catalog does not know by its driver's name
    python bench/gpu_check.py --precision fp8          # other recipes; --eager leaves compiled blocks out
    python bench/gpu_check.py --skip-without-cuda      # exit code 0 where there is no device
    python bench/gpu_check.py --cpu                    # the same program on the processor, tiny: proves the program, not the device

Held to: bytes of parameters, gradients and optimizer equal to the estimate exactly, peak allocated within 5 % of it, a loss that falls, and
the first loss of plain PyTorch within 1e-6 in float32. Speed is printed, not judged. World size is 1; NCCL is not needed.
Exit codes: 0 all held, 1 something did not, 2 no device or bad input.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

import meshwright as mw
from meshwright.base.errors import InputError, MeshwrightError, NothingFits
from meshwright.base.units import show_bytes, show_count, show_seconds
from meshwright.intake.job import read_job, resolve
from meshwright.models.registry import build
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MEMORY_TOLERANCE, LOSS_TOLERANCE = 0.05, 1e-6
WARM = 3
SIZES: tuple[dict[str, Any], ...] = (
    {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 5504, "vocab": 32000, "seq": 4096},
    {"layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2816, "vocab": 32000, "seq": 2048},
    {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1408, "vocab": 32000, "seq": 1024},
)
"""The first of these that fits is trained: about 1.3 B, 0.3 B and 0.06 B parameters."""
TINY: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 192, "vocab": 512, "seq": 64}


@dataclass
class Measured:
    """What the run showed. `peak` and `reserved` are 0 where the device does not count them."""

    losses: list[float]
    seconds: float
    held: dict[str, int]
    peak: int
    reserved: int


def job_of(sizes: dict[str, Any], cluster: str, batch: int, precision: str) -> Job:
    options = {
        "model.name": "llama-tiny",
        "model.sizes": sizes,
        "cluster.name": cluster,
        "workload.batch": batch,
        "workload.sequence": sizes["seq"],
        "workload.precision": precision,
    }
    return resolve(read_job(None, (), options))


def choose(
    cluster: str, plan: str, batch: int, precision: str = "bf16", compiled: bool = False
) -> tuple[dict[str, Any], Job, Plan, Estimate]:
    """The largest size that fits, with the planner's plan or the given one."""
    for sizes in SIZES:
        job = job_of(sizes, cluster, batch, precision)
        job = job.but(pins={**job.pins, "compile": True}) if compiled else job
        try:
            entry = None if plan != "auto" else mw.plan(job, 1)[0]
        except NothingFits:
            continue
        chosen = entry.plan if entry else mw.parse_plan(plan)
        estimate = mw.estimate(job, chosen)
        if estimate.fits:
            return sizes, job, chosen, estimate
    raise NothingFits(f"none of {len(SIZES)} sizes fits on {cluster} with plan {plan}")


def batch_of(sizes: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(sizes["vocab"], (rows, sizes["seq"]), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def same_loss(device: torch.device) -> float:
    """Relative difference of the first loss to that of the same model in plain PyTorch, float32."""
    torch.manual_seed(1)
    model = build({"kind": "llama", **TINY}).to(device)
    batch = batch_of(TINY, 4)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"].to(device)).logits.float()
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten().to(device)).item()
    trainer = mw.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params), plan="dp1")
    return abs(trainer.step(batch).loss / plain - 1)


def train(sizes: dict[str, Any], job: Job, plan: Plan, steps: int, device: torch.device) -> Measured:
    """`steps` timed steps on one batch, after a few that warm up."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    model = build({"kind": "llama", **sizes})
    workload = job.workload
    trainer = mw.parallelize(
        model, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True), plan=plan, precision=workload.recipe, clip=1.0
    )
    batch = batch_of(sizes, workload.batch)
    losses, seconds = [], []
    for step in range(WARM + steps):
        began = time.perf_counter()
        losses.append(trainer.step(batch).loss)
        if cuda:
            torch.cuda.synchronize()
        if step >= WARM:
            seconds.append(time.perf_counter() - began)
    peak, taken = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return Measured(losses, statistics.median(seconds), trainer.bytes(), peak, taken)


def faults_of(measured: Measured, estimate: Estimate, difference: float) -> list[str]:
    """What was not as promised, a line each."""
    found = []
    if not difference <= LOSS_TOLERANCE:
        found.append(f"first loss differs from plain PyTorch's by {difference:.1e}, more than {LOSS_TOLERANCE:.0e}")
    for kind, bytes_held in measured.held.items():
        if bytes_held != getattr(estimate.memory, kind):
            found.append(f"{kind}: {bytes_held:,} bytes are held, {getattr(estimate.memory, kind):,.0f} were predicted")
    if measured.peak and abs(measured.peak / estimate.memory.total - 1) > MEMORY_TOLERANCE:
        off = measured.peak / estimate.memory.total - 1
        found.append(f"peak allocated is {off:+.0%} off the estimate, more than {MEMORY_TOLERANCE:.0%}")
    if not measured.losses[-1] < measured.losses[0]:
        found.append(f"the loss did not fall: {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}")
    return found


def show(name: str, job: Job, plan: Plan, estimate: Estimate, measured: Measured, difference: float) -> dict[str, Any]:
    """The figures on standard error, and as data."""
    tokens = job.workload.tokens / measured.seconds
    mfu = estimate.mfu * estimate.time.step / measured.seconds
    lines = [
        f"device          {name}, torch {torch.__version__}",
        f"model           {show_count(job.model.parameters)} parameters, batch {job.workload.batch} x {job.workload.sequence}, "
        f"{job.workload.precision}, plan {plan.name}",
        f"first loss      {difference:.1e} off plain PyTorch (float32, small model)",
        f"loss            {measured.losses[0]:.4f} to {measured.losses[-1]:.4f} in {len(measured.losses)} steps on one batch",
        f"step            {show_seconds(measured.seconds)} measured, {show_seconds(estimate.time.step)} predicted",
        f"tokens/s        {tokens:,.0f} measured, {estimate.tokens_per_second:,.0f} predicted",
        f"MFU             {mfu:.1%} measured, {estimate.mfu:.1%} predicted",
        f"peak allocated  {show_bytes(measured.peak) if measured.peak else 'not counted here'}, {show_bytes(estimate.memory.total)} predicted",
        f"peak reserved   {show_bytes(measured.reserved) if measured.reserved else 'not counted here'}, {show_bytes(estimate.memory.reserved)} predicted",
    ]
    print("\n".join(lines), file=sys.stderr)
    return {
        "device": name, "torch": torch.__version__, "plan": plan.name, "parameters": job.model.parameters, "first_loss_difference": difference,
        "losses": measured.losses, "seconds": measured.seconds, "tokens_per_second": tokens, "mfu": mfu, "held": measured.held,
        "peak_allocated": measured.peak, "peak_reserved": measured.reserved, "estimate": estimate.model_dump(),
    }  # fmt: skip


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="local:1", help="the device, such as 1x1:h100; default: what the driver shows")
    parser.add_argument("--plan", default="auto", help="a plan of one rank; default: the planner's")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="bf16", help="bf16, bf16-pure, fp8, fp16")
    parser.add_argument("--eager", action="store_true", help="without compiled blocks")
    parser.add_argument("--cpu", action="store_true", help="the same program on the processor, tiny, float32")
    parser.add_argument("--skip-without-cuda", action="store_true", help="exit code 0 where there is no CUDA device")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    if not options.cpu and not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else "built with CUDA, but the driver shows no device"
        if options.skip_without_cuda:
            print(f"gpu-check: skipped: no CUDA device (torch {torch.__version__} is {built})", file=sys.stderr)
            return 0
        raise InputError(
            f"no CUDA device: torch {torch.__version__} is {built}; --skip-without-cuda makes this no error, --cpu runs it tiny on the processor"
        )
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    if options.cpu:
        sizes, job = TINY, job_of(TINY, "1x1:cpu", 4, "fp32")
        plan = mw.parse_plan("dp1" if options.plan == "auto" else options.plan)
        estimate = mw.estimate(job, plan)
    else:
        sizes, job, plan, estimate = choose(options.cluster, options.plan, options.batch, options.precision, not options.eager)
    difference = same_loss(device)
    measured = train(sizes, job, plan, options.steps, device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "the processor"
    data = show(name, job, plan, estimate, measured, difference)
    found = faults_of(measured, estimate, difference)
    for fault in found:
        print(f"gpu-check: {fault}", file=sys.stderr)
    if options.json:
        print(json.dumps({**data, "faults": found}))
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeshwrightError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        sys.exit(2)
