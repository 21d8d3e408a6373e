"""Part D, options: the first loss in float32 beside plain PyTorch, copies of activations to the host beside kernels,
and the speed of fp8 beside bf16."""

from __future__ import annotations

from typing import Any

import torch
from bench.gpu_check.common import (
    TINY,
    WARM_STEPS,
    Bench,
    Findings,
    build_model,
    first_line,
    free_memory,
    make_batch,
    make_job,
    make_trainer,
    train,
)
from bench.gpu_check.memory import SIZES

import meshwright as mw
from meshwright.core.units import show_seconds
from meshwright.spec.plan import parse_plan

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative differences in float32: of the first loss, and of a gradient with activations on the host."""

HIDDEN_GOAL = 0.7
"""Part of the time of copies during which kernels run."""

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
    """Largest relative difference of a gradient with activations on the host to that with activations on the device."""
    batch = make_batch(sizes, ROWS)

    def gradients(way: str) -> dict[str, torch.Tensor]:
        free_memory(device)
        found = make_trainer(sizes, f"dp1.mb{ROWS}{way}", "fp32").gradients(batch)[2]
        assert found is not None, "one rank has all gradients"
        return found  # type: ignore[no-any-return]

    here, there = gradients(""), gradients(".off-activations")
    return max(float((there[name] - value).norm() / value.norm().clamp_min(1e-30)) for name, value in here.items())


def copies_beside_kernels(sizes: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Seconds of copies between device and host in a step with activations on the host, and the part of this time
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


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not touch.

    >>> joined([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Time that lies in spans of both.

    >>> common([(0, 4), (6, 8)], [(1, 2), (3, 7)])
    3
    """
    lengths = [sum(stop - start for start, stop in joined(spans)) for spans in (one, other, one + other)]
    return lengths[0] + lengths[1] - lengths[2]


def run(bench: Bench) -> Findings:
    found = Findings()
    sizes = TINY if bench.tiny else SIZES
    loss = first_loss_difference(bench.device)
    found.claim(f"first loss of plain PyTorch within {LOSS_TOLERANCE:.0e}", f"{loss:.1e}", loss <= LOSS_TOLERANCE)
    if bench.tiny:
        return found
    apart = gradient_difference(sizes, bench.device)
    found.data |= {"first_loss": loss, "gradients_off_activations": apart}
    found.claim(
        f"off-activations: gradients in float32 within {GRADIENT_TOLERANCE:.0e}",
        f"{apart:.1e}",
        apart <= GRADIENT_TOLERANCE,
    )
    copying, hidden = copies_beside_kernels(sizes, bench.device)
    found.data |= {"copies": copying, "copies_hidden": hidden}
    figure = f"{hidden:.0%} of {show_seconds(copying)}"
    text = f"copies of activations beside kernels at least {HIDDEN_GOAL:.0%}"
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
