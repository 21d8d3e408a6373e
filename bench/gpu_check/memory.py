"""Part C, memory: trains under plans that save memory. Compares the bytes of parameters, gradients and optimizer
states and the memory peak with the estimate, and the losses with those of the plan without these options."""

from __future__ import annotations

from typing import Any

from bench.gpu_check.common import (
    MEMORY_TOLERANCE,
    TINY,
    Bench,
    Findings,
    Measured,
    first_line,
    make_job,
    relative,
    train,
)

import meshwright as mw
from meshwright.core.units import show_bytes, show_seconds
from meshwright.spec.estimate import Estimate
from meshwright.spec.plan import parse_plan

SIZES: dict[str, Any] = {
    "layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2816, "vocab": 32000, "seq": 2048,
}  # fmt: skip
BATCH = 16
OPTIONS = (
    "", "rc-full", "rc-attn", "lc4", "compile", "off-activations", "off-optimizer", "off-optimizer50",
    "off-optimizer-disk", "z3.off-parameters", "z2.off-optimizer.off-gradients",
    "z3.off-optimizer.off-gradients.off-parameters",
)  # fmt: skip
"""The options that each plan adds to `dp1`. The plan without options comes first."""

FIRST_LOSS_TOLERANCE, LAST_LOSS_TOLERANCE = 1e-6, 1e-3
"""Relative differences of losses: a chunked loss and kernels for bfloat16 may sum in another order."""


def compare(found: Findings, estimate: Estimate, measured: Measured, plain: Measured, name: str) -> None:
    """Adds the claims about one plan."""
    wrong = [
        f"{kind} {measured.bytes[kind]:,} instead of {getattr(estimate.memory, kind):,.0f}"
        for kind in ("parameters", "gradients", "optimizer")
        if measured.bytes[kind] != getattr(estimate.memory, kind)
    ]
    found.claim(f"{name}: bytes of states are the estimate's", "; ".join(wrong) or "equal", not wrong)
    first, last = (abs(measured.losses[at] / plain.losses[at] - 1) for at in (0, -1))
    equal = first <= FIRST_LOSS_TOLERANCE and last <= LAST_LOSS_TOLERANCE
    found.claim(f"{name}: losses of the plain plan", f"first {first:.1e}, last {last:.1e} apart", equal)
    if measured.peak:
        off = relative(measured.peak, estimate.memory.total)
        found.claim(
            f"{name}: peak allocated within {MEMORY_TOLERANCE:.0%} of the estimate",
            f"{show_bytes(measured.peak)} measured, {show_bytes(estimate.memory.total)} predicted ({off:+.1%}), "
            f"{show_bytes(measured.reserved)} reserved, step {show_seconds(measured.seconds)}",
            abs(off) <= MEMORY_TOLERANCE,
        )


def run(bench: Bench) -> Findings:
    found = Findings()
    sizes, batch, precision = (TINY, 4, "fp32") if bench.tiny else (SIZES, BATCH, "bf16")
    job = make_job(sizes, bench.cluster, batch, precision)
    plain: Measured | None = None
    # The memory of a CPU is the host's memory: nothing can be offloaded there.
    for way in OPTIONS if not bench.tiny else [way for way in OPTIONS if "off" not in way and way != "compile"]:
        plan = parse_plan(".".join(part for part in ("dp1", f"mb{batch // 4}", way) if part))
        try:
            estimate = mw.estimate(job, plan)
            measured = train(sizes, job, plan, bench.steps, bench.device)
        except Exception as error:  # an error of one plan must not prevent the others
            found.claim(f"{plan.name}: trains", first_line(error), False)
            continue
        plain = plain or measured
        compare(found, estimate, measured, plain, plan.name)
        found.data[plan.name] = {
            "losses": measured.losses, "seconds": measured.seconds, "predicted": estimate.time.step,
            "peak": measured.peak, "reserved": measured.reserved, "memory_predicted": estimate.memory.model_dump(),
        }  # fmt: skip
        found.save()
    return found
