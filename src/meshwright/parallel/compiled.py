"""Compiled blocks: each block's own computation goes through torch.compile, everything around it stays as it is.

What is compiled is the forward inside a gate: gathering of weights, recompute, cuts of the sequence and stages lie outside. Collectives and
layers with a forward of ours (tensor parallelism, weight gradients that are put off, experts) wait for other ranks: the compiler is kept out of
them, so that a block of theirs is compiled in the pieces between. Blocks are alike, so the first one's code serves all.

Results are those of eager mode within the rounding of fused operations. Where a compiler is missing, and with what the compiler does not see
(attention over context ranks, an attention core that is computed again), the plan is refused in one line.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.pipeline.gates import Gate
from meshwright.spec.plan import Plan
from meshwright.spec.rules import compile_faults

SWITCH = "MESHWRIGHT_COMPILER"
"""Environment variable: another backend of torch.compile than inductor."""


def check_compiler(plan: Plan, device: torch.device) -> None:
    """InputError where blocks of `plan` cannot be compiled on `device`."""
    if not plan.compile:
        return
    for fault in compile_faults(plan):
        raise InputError(f"plan {plan.name}: {fault.message}")
    if backend() != "inductor":
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise InputError(f"plan {plan.name}: compile needs the package triton, which comes with torch for CUDA: leave compile out")
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise InputError(
            f"plan {plan.name}: compile needs a C++ compiler (g++ or clang++; CXX names another): install one, or leave compile out"
        )


def backend() -> str:
    return os.environ.get(SWITCH) or "inductor"


def compile_blocks(gates: Sequence[Gate], blocks: Sequence[nn.Module]) -> None:
    """The computation inside of the gates of `blocks` is compiled when it first runs."""
    for gate in gates:
        if gate.index is not None:
            block = blocks[gate.index]
            for module in block.modules():
                _keep_out(module, block)
            gate.inner = torch.compile(gate.inner, backend=backend(), dynamic=False)


def _keep_out(module: nn.Module, block: nn.Module) -> None:
    """The compiler does not look into forwards and hooks of ours."""
    held: Any = vars(module)
    if module is not block and "forward" in held:
        module.forward = torch.compiler.disable(held["forward"])  # type: ignore[method-assign]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            hooks[number] = torch.compiler.disable(hook)


def seconds() -> float:
    """That this process has spent compiling. The counter is private to torch: tests/ranks/test_compile.py fails when it moves."""
    from torch._dynamo.utils import calculate_time_spent

    spent = calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def first_step(took: float) -> str:
    """What a run says after its first step, which took so many seconds."""
    return f"compiled blocks: {seconds():.1f} s for the compiler up to the end of the first step, which took {took:.1f} s"
