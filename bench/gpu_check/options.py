"""Part D, options: compares the first loss in float32 with plain PyTorch, the gradients of offloaded activations with
those of activations on the device, and the speed of fp8 with that of bf16. Measures how far copies to the host overlap
with kernels. kernels.py has the checks of float8 products and of packed documents."""

from __future__ import annotations

from typing import Any

import torch
from bench.gpu_check.common import (
    TINY,
    WARM_STEPS,
    Bench,
    Findings,
    build_model,
    common,
    first_line,
    free_memory,
    joined,
    make_batch,
    make_job,
    make_trainer,
    train,
)
from bench.gpu_check.kernels import check_kernels
from bench.gpu_check.memory import SIZES

import meshwright as mw
from meshwright.core.units import show_seconds
from meshwright.spec.plan import parse_plan

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative differences in float32: of the first loss, and of a gradient with offloaded activations."""

EXPERT_TOLERANCE, ROUNDED = 1e-4, 0.01
"""Relative differences of a mixture of experts to one in float32 on the CPU: of a gradient in float32, whose products
the device sums in another order, and of the first loss in bfloat16."""

HIDDEN_GOAL = 0.7
"""Fraction of the time of copies during which kernels run."""

ROWS = 4


def first_loss_difference(device: torch.device) -> float:
    """Relative difference of the first loss to that of the same model in plain PyTorch, in float32."""
    model = build_model(TINY).to(device)
    batch = make_batch(TINY, ROWS)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"].to(device)).logits.float()
    labels = batch["labels"][:, 1:].flatten().to(device)
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels).item()
    trainer = mw.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params), plan="dp1")
    return abs(trainer.step(batch).loss / plain - 1)


def gradient_difference(sizes: dict[str, Any], device: torch.device) -> float:
    """Largest relative difference between a gradient with offloaded activations and one with activations on the
    device."""
    batch = make_batch(sizes, ROWS)

    def gradients(way: str) -> dict[str, torch.Tensor]:
        free_memory(device)
        found = make_trainer(sizes, f"dp1.mb{ROWS}{way}", "fp32").gradients(batch)[2]
        assert found is not None, "one rank has all gradients"
        return found  # type: ignore[no-any-return]

    here, there = gradients(""), gradients(".off-activations")
    return max(float((there[name] - value).norm() / value.norm().clamp_min(1e-30)) for name, value in here.items())


def expert_differences(device: torch.device) -> tuple[float, float]:
    """The largest relative difference of a gradient in float32 between a mixture of experts on the device and plain
    PyTorch on the CPU, and the relative difference of the first loss in bfloat16."""
    sizes, batch = TINY | {"experts": 8, "top_k": 2}, make_batch(TINY, ROWS)
    plain = build_model(sizes)
    logits = plain(input_ids=batch["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    made = make_trainer(sizes, f"dp1.mb{ROWS}", "fp32").gradients(batch)[2]
    apart = max(
        float((made[name].cpu() - value.grad).norm() / value.grad.norm().clamp_min(1e-30))
        for name, value in plain.named_parameters()
        if value.grad is not None
    )
    free_memory(device)
    rounded = make_trainer(sizes, f"dp1.mb{ROWS}", "bf16").step(batch).loss
    return apart, abs(rounded / loss.item() - 1)


def copies_and_overlap(sizes: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Seconds of copies between device and host in a step with offloaded activations, and the fraction of this time
    during which kernels run."""
    from torch.profiler import ProfilerActivity, profile

    free_memory(device)
    trainer, batch = make_trainer(sizes, f"dp1.mb{ROWS}.off-activations", "bf16"), make_batch(sizes, ROWS)
    for _ in range(WARM_STEPS):
        trainer.step(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trainer.step(batch)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in seen.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device and not event.name.startswith("Memset") and not getattr(event, "is_user_annotation", False):
            is_copy = "Memcpy" in event.name and ("HtoD" in event.name or "DtoH" in event.name)
            spans[is_copy].append((event.time_range.start, event.time_range.end))
    copying = sum(stop - start for start, stop in joined(spans[True]))
    return copying / 1e6, common(spans[True], spans[False]) / copying if copying else 0.0


def run(bench: Bench) -> Findings:
    found = Findings()
    sizes = TINY if bench.tiny else SIZES
    loss = first_loss_difference(bench.device)
    found.claim(f"first loss of plain PyTorch within {LOSS_TOLERANCE:.0e}", f"{loss:.1e}", loss <= LOSS_TOLERANCE)
    gradient, rounded = expert_differences(bench.device)
    found.data["experts"] = {"gradient": gradient, "bf16_loss": rounded}
    found.claim(
        f"experts: gradients in float32 within {EXPERT_TOLERANCE:.0e} of the CPU's",
        f"{gradient:.1e}",
        gradient <= EXPERT_TOLERANCE,
    )
    found.claim(f"experts: first loss in bf16 within {ROUNDED:.0%}", f"{rounded:.1e}", rounded <= ROUNDED)
    check_kernels(found, bench)
    if bench.tiny:
        return found
    apart = gradient_difference(sizes, bench.device)
    found.data |= {"first_loss": loss, "gradients_off_activations": apart}
    found.claim(
        f"off-activations: gradients in float32 within {GRADIENT_TOLERANCE:.0e}",
        f"{apart:.1e}",
        apart <= GRADIENT_TOLERANCE,
    )
    copying, hidden = copies_and_overlap(sizes, bench.device)
    found.data |= {"copies": copying, "copies_hidden": hidden}
    figure = f"{hidden:.0%} of {show_seconds(copying)}"
    text = f"copies of activations overlapped with kernels, at least {HIDDEN_GOAL:.0%}"
    found.claim(text, figure, hidden >= HIDDEN_GOAL, required=False)
    found.save()
    seconds = {}
    for precision in ("bf16", "fp8"):
        job = make_job(sizes, bench.cluster, 4 * ROWS, precision)
        try:
            seconds[precision] = train(sizes, job, parse_plan("dp1.mb4.compile"), bench.steps, bench.device).seconds
        except Exception as error:
            found.claim(f"{precision}, compiled: trains", first_line(error), False)
    if len(seconds) == 2:
        found.data["precisions"] = seconds
        ratio = f"{seconds['bf16'] / seconds['fp8']:.2f} ({show_seconds(seconds['bf16'])} in bf16)"
        found.claim("speed of fp8 relative to bf16, compiled", ratio)
    return found
