"""What the sentinel and the guards cost: steps with and without them, in turn, on two ranks of this machine.

python -m bench.sentinel            # writes bench/results/sentinel.md

Seconds within pairs say what a user waits; on a machine that does other work they vary by more than the sentinel takes.
So its seconds of the processor are
compared with those of the whole process, which waiting does not change, and the bytes that it reads with those that a
step reads of parameters and states at least.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.peers import batch_of
from bench.ranks import run
from bench.systems import Sizes
from meshwright.models.registry import build_reference_model
from meshwright.train.step.invariants import MIN_WINDOW_ELEMENTS, StepInvariants, window_count
from meshwright.train.trainer import parallelize

LEAST = 28
"""Bytes of float32 that a step reads of each parameter: two passes, the reduction, and the update with its gradient and
two states."""


FIRST_STEP = 20
"""The number of the first step here: the checks of first steps are over, and the guards accept sizes once."""


class Timed(StepInvariants):
    """Counts the CPU seconds of the invariants and of the guards around a step."""

    spent = 0.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        around = self.guards.check_around

        def timed(*given: Any) -> None:
            began = time.thread_time()
            around(*given)
            self.spent += time.thread_time() - began

        self.guards.check_around = timed  # type: ignore[method-assign]

    def sums(self, *given: Any) -> torch.Tensor:
        began = time.thread_time()
        found = super().sums(*given)
        self.spent += time.thread_time() - began
        return found

    def check(self, *given: Any) -> None:
        began = time.thread_time()
        super().check(*given)
        self.spent += time.thread_time() - began


def measured(pairs: int, warm: int) -> dict[str, Any]:
    """On every rank: seconds of steps with and without, in turn, and what of them is the sentinel's."""
    sizes = Sizes()
    torch.manual_seed(0)
    heads = {"heads": sizes.heads, "kv_heads": sizes.heads}
    shape = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "ffn": sizes.ffn,
        "vocab": sizes.vocab,
        "seq": sizes.sequence,
        **heads,
    }
    model = build_reference_model({"kind": "llama", **shape, "tied": False})
    elements = sum(parameter.numel() for parameter in model.parameters())
    trainer = parallelize(model, lambda given: torch.optim.AdamW(given, lr=1e-4), "dp2.mb4", prove="never")
    on = Timed(trainer.engine, trainer.optimizer, trainer.prover)
    found: dict[str, Any] = {"elements": elements, "with": [], "without": [], "processor": [], "own": []}
    trainer.engine.preflight.steps = FIRST_STEP
    for pair in range(warm + pairs):
        for name, sentinel in (("with", on), ("without", None)) if pair % 2 else (("without", None), ("with", on)):
            trainer.passes.invariants, on.spent = sentinel, 0.0
            began, processor = time.perf_counter(), time.process_time()
            trainer.step(batch_of(sizes, pair))
            if pair >= warm:
                found[name].append(time.perf_counter() - began)
                if sentinel is on:
                    found["processor"].append(time.process_time() - processor)
                    found["own"].append(on.spent)
    units = trainer.engine.zero.units
    parts = window_count(elements, sizes.batch * sizes.sequence / 2, 8, "cpu")
    found["bytes"] = sum(
        2 * 4 * min(unit.weights.full.numel(), max(MIN_WINDOW_ELEMENTS, -(-unit.weights.full.numel() // parts)))
        for unit in units
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    chosen = parser.parse_args()
    found, *_ = run(2, measured, chosen.pairs, 1)
    sizes, elements, without = Sizes(), found["elements"], median(found["without"])
    within = median((one - other) / other for one, other in zip(found["with"], found["without"], strict=True))
    share = median(own / whole for own, whole in zip(found["own"], found["processor"], strict=True))
    text = (
        f"# What the sentinel costs\n\nllama of {elements / 1e6:.2f} M parameters, {sizes.batch} rows of "
        f"{sizes.sequence} tokens a step, dp2.mb4 on 2 processes, float32; {chosen.pairs} pairs of steps with and "
        f"without, in turn; medians. Load of the machine: {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores; "
        "seconds that differ within pairs mean something where it is no more than the two processes. `python -m "
        f"bench.sentinel`\n\n| | a step |\n|---|---|\n| seconds without | {without * 1e3:.0f} ms |\n| seconds with, "
        f"difference within pairs | {within:+.2%} |\n| seconds of the processor, the whole step | "
        f"{median(found['processor']) * 1e3:.0f} ms |\n| of these in the sentinel and the guards | "
        f"{median(found['own']) * 1e3:.2f} ms, {share:.3%} |\n| bytes that it reads, per parameter | "
        f"{found['bytes'] / elements:.2f} of at least {LEAST} that a step reads |\n"
    )
    Path(__file__).with_name("results").joinpath("sentinel.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
