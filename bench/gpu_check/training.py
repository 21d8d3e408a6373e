"""Part B, training: a model with the layers of Llama 3 8B, as many as fit, eager and compiled. Compares step time and
memory with the estimates, and measures the causal MFU, the time by kernel category, the fraction of a step in which the
device is idle, and how often the host waits for the device."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from bench.gpu_check.common import (
    MEMORY_TOLERANCE,
    STEP_TOLERANCE,
    TINY,
    Bench,
    Findings,
    choose_plan,
    first_line,
    free_memory,
    joined,
    make_batch,
    make_job,
    make_trainer,
    relative,
)

from meshwright.core.units import show_bytes, show_count, show_seconds
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

LAYER: dict[str, Any] = {
    "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256, "seq": 8192,
}  # fmt: skip
LAYERS = (20, 16, 12, 10, 8, 6, 4, 2)
"""The first number of layers is trained whose plan fits without recomputing whole blocks, if there is one."""

BATCH = 4
MFU_GOAL = 0.50
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
CATEGORIES = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "wgmma"),
    "copies": ("memcpy", "memset", "copy"),
    "optimizer": ("adam", "multi_tensor"),
    "compiled": ("triton",),
}
"""Parts of kernel names, in lower case, by category. The first match counts; all else is `other`."""


HOPPER = 989.4e12
NOMINAL_FLOPS = {
    "NVIDIA H100 80GB HBM3": HOPPER, "NVIDIA H200": HOPPER, "NVIDIA GH200 480GB": HOPPER,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-SXM4-40GB": 312e12,
}  # fmt: skip
"""Dense bf16 FLOP/s of the data sheet, by the name that the driver reports. The MFU is relative to it."""


def category_of(kernel: str) -> str:
    """
    >>> category_of("nvjet_tst_128x256_64x4"), category_of("void at::native::vectorized_elementwise_kernel<4>")
    ('products', 'other')
    """
    name = kernel.lower()
    return next((kind for kind, parts in CATEGORIES.items() if any(part in name for part in parts)), "other")


def causal_flops(sizes: dict[str, Any], parameters: float, tokens: float) -> float:
    """Model FLOPs of one step. Products with weights take 6 per parameter and token, without the input embedding, which
    is no product. Causal attention takes 6 per token, layer, head element and key: 12 without the half that is masked.
    Source: PaLM (2022), appendix B."""
    products = 6 * (parameters - sizes["vocab"] * sizes["hidden"])
    attention = 6 * sizes["layers"] * sizes["heads"] * sizes["head_dim"] * sizes["seq"]
    return (products + attention) * tokens


def select(bench: Bench, compiled: bool) -> tuple[dict[str, Any], Job, Plan, Any]:
    """The largest model of LAYERS whose plan fits, preferably one whose plan recomputes no whole block."""
    if bench.tiny:
        choices = [TINY]
    else:
        choices = [{**LAYER, "layers": layers} for layers in LAYERS]
    found = None
    for sizes in choices:
        job = make_job(sizes, bench.cluster, BATCH, "fp32" if bench.tiny else "bf16", compiled and not bench.tiny)
        if (choice := choose_plan(job)) is None:
            continue
        found = found or (sizes, job, *choice)
        if not any(part in choice[0].name for part in ("rc-full", "off-")):
            return sizes, job, *choice
    if found is None:
        raise RuntimeError(f"no model of {len(choices)} fits on {bench.cluster.name}")
    return found


def profile_step(trainer: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Profiles one step: seconds of kernels by category, idle fraction of the device, and waits of the host."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trainer.step(batch)
        torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    kernels: list[tuple[float, float]] = []
    waits: Counter[str] = Counter()
    for event in seen.events() or ():
        start, stop = event.time_range.start, event.time_range.end
        if event.device_type != torch.autograd.DeviceType.CUDA:
            if event.name in WAITS:
                waits[event.name] += 1
        elif not getattr(event, "is_user_annotation", False):
            seconds[category_of(event.name)] += (stop - start) / 1e6
            names[event.name[:100]] += (stop - start) / 1e6
            kernels.append((start, stop))
    span = (max(stop for _, stop in kernels) - min(start for start, _ in kernels)) / 1e6 if kernels else 0.0
    busy = sum(stop - start for start, stop in joined(kernels)) / 1e6
    waits["cudaDeviceSynchronize"] -= 1  # that of this function
    return {
        "seconds": dict(seconds.most_common()), "kernels": len(kernels), "span": span,
        "longest": dict(names.most_common(25)),
        "idle": 1 - busy / span if span else 0.0, "waits": {name: count for name, count in waits.items() if count > 0},
    }  # fmt: skip


class Laps:
    """Measures the seconds of consecutive sections, and prints each at its end. If a part exceeds its time limit, the
    output shows in which section."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
        print(f"  {name}: {self.seconds[name]:.1f} s", file=sys.stderr, flush=True)


def measure(bench: Bench, compiled: bool) -> Findings:
    found = Findings()
    sizes, job, plan, estimate = select(bench, compiled)
    kind = "compiled" if compiled else "eager"
    before = free_memory(bench.device)
    laps = Laps()
    trainer = make_trainer(sizes, plan, job.workload.recipe, prove="never" if compiled else "start", fused=True)
    laps.end(f"{kind} {plan.name}: build and parallelize")
    batch = make_batch(sizes, BATCH)
    losses = []
    for name in ("first step", "second step"):
        losses.append(trainer.step(batch).loss)
        laps.end(name)
    if (proof := trainer.prover.last) is not None:
        found.data["proof"] = proof.model_dump()
        found.claim(
            f"{kind}: the plan is equal to one device by a proof",
            f"loss {proof.loss:.1e}, gradients {proof.gradient:.1e}, {proof.contents[0]}, {proof.seconds:.1f} s",
            proof.equal,
        )
        free_memory(bench.device)  # the peak below is that of steps, without the proof

    def timed_steps(count: int) -> list[float]:
        found = []
        for _ in range(count):
            started = time.perf_counter()
            losses.append(trainer.step(batch).loss)
            if not bench.tiny:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
        return found

    timed_steps(1)  # checks run before the third step
    seconds = timed_steps(bench.steps)
    step = statistics.median(seconds)
    flops = causal_flops(sizes, job.model.parameters, job.workload.tokens)
    peak_rate = job.cluster.groups[0].device.peak.get("bf16", 0.0)
    nominal = NOMINAL_FLOPS.get(bench.name, 0.0)
    mfu = flops / step / nominal if nominal else 0.0
    found.data |= {
        "model": sizes, "parameters": job.model.parameters, "plan": plan.name, "losses": losses, "seconds": seconds,
        "step": step, "predicted": estimate.time.step, "mfu": mfu, "tokens_per_second": job.workload.tokens / step,
        "flops": flops, "measured_peak_rate": peak_rate, "laps": laps.seconds,
        "memory_predicted": estimate.memory.model_dump(),
    }  # fmt: skip
    title = f"{kind}, {sizes['layers']} layers, {show_count(job.model.parameters)}, {plan.name}"
    found.claim(f"{title}: the loss falls", f"{losses[0]:.4f} to {losses[-1]:.4f}", losses[-1] < losses[0])
    if bench.tiny:
        return found
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    found.data |= {"peak": peak, "reserved": reserved, "profile": profile_step(trainer, batch)}
    profile = found.data["profile"]
    off, apart = relative(estimate.time.step, step), relative(peak, estimate.memory.total)
    found.claim(f"{kind}: causal MFU at least {MFU_GOAL:.0%}", f"{mfu:.1%}", mfu >= MFU_GOAL, required=False)
    found.claim(
        f"{kind}: step predicted within {STEP_TOLERANCE:.0%}",
        f"{show_seconds(step)} measured, {show_seconds(estimate.time.step)} predicted ({off:+.1%})",
        abs(off) <= STEP_TOLERANCE,
        required=False,
    )
    found.claim(
        f"{kind}: peak allocated within {MEMORY_TOLERANCE:.0%} of the estimate",
        f"{show_bytes(peak)} measured, {show_bytes(estimate.memory.total)} predicted ({apart:+.1%})",
        abs(apart) <= MEMORY_TOLERANCE,
    )
    found.claim(
        f"{kind}: reserved at most the estimate",
        f"{show_bytes(reserved)} measured, {show_bytes(estimate.memory.reserved)} predicted",
        reserved <= estimate.memory.reserved,
    )
    shares = ", ".join(f"{name} {part / profile['span']:.0%}" for name, part in profile["seconds"].items())
    found.claim(f"{kind}: time of kernels by category", f"{shares}; idle {profile['idle']:.1%}")
    found.claim(f"{kind}: waits of the host in a step", str(sum(profile["waits"].values())))
    return found


def run(bench: Bench) -> Findings:
    found = Findings()
    for compiled in (False, True) if not bench.tiny else (False,):
        kind = "compiled" if compiled else "eager"
        try:
            one = measure(bench, compiled)
        except Exception as error:  # an error in eager mode must not prevent the compiled run
            found.claim(f"{kind}: trains", first_line(error), False)
            found.data[f"{kind}_error"] = traceback.format_exc()
        else:
            found.claims += one.claims
            found.data[kind] = one.data
            found.save()
        if not bench.tiny:
            torch._dynamo.reset()
        free_memory(bench.device)
    if "eager" in found.data and "compiled" in found.data:
        ratio = found.data["eager"]["step"] / found.data["compiled"]["step"]
        found.claim("speed of compiled relative to eager", f"{ratio:.2f}")
    return found
