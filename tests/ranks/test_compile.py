"""Compiled blocks compute what one device computes. The compiler's front and its derivatives run in every test (backend `aot_eager`); code
generation, which takes half a minute a block on a CPU, in the soak."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from equality import alone, check, train

from meshwright.base.errors import InputError
from meshwright.parallel import compiled
from meshwright.spec.plan import parse_plan

PLANS = ("dp1.compile", "dp2.z3.mb2.compile", "tp2.mb4.compile", "tp2.sp.mb4.compile", "pp2.rc-layer.compile", "pp2.zb1.compile",
         "dp2.tp2.z1.mb2.compile", "pp2.off-activations.compile")  # fmt: skip


def train_with(backend: str, *given: Any) -> tuple[dict[str, Any], float]:
    """On every rank: what `train` returns, and the seconds that the compiler took."""
    import torch._dynamo

    before = os.environ.get(compiled.SWITCH)
    os.environ[compiled.SWITCH] = backend
    torch._dynamo.reset()
    began = compiled.seconds()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own, of tensors that it looks at
            return train(*given), compiled.seconds() - began
    finally:
        os.environ.pop(compiled.SWITCH)
        if before is not None:
            os.environ[compiled.SWITCH] = before


@pytest.mark.parametrize("plan", ["dp1.compile"])
def test_compiled_blocks_compute_what_one_device_computes(ranks: Any, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_with, "aot_eager", "llama", plan, "fp64", 2)
    check(alone("llama", "fp64", 2), [result for result, _ in found], "fp64")
    assert all(seconds > 0 for _, seconds in found), "nothing was compiled, or torch counts it elsewhere"
    assert compiled.first_step(12.0).endswith("the first step, which took 12.0 s")


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["llama", "hf-llama", "gpt2"])
def test_compiled_blocks_go_with_every_strategy(ranks: Any, model: str, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_with, "aot_eager", model, plan, "fp64", 2)
    check(alone(model, "fp64", 2), [result for result, _ in found], "fp64")


@pytest.mark.soak
def test_generated_code_computes_what_one_device_computes(ranks: Any) -> None:
    found = ranks.run(1, train_with, "inductor", "llama", "dp1.compile", "fp32", 2)
    check(alone("llama", "fp32", 2), [result for result, _ in found], "fp32")


def test_without_a_compiler_a_compiled_plan_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        compiled.check_compiler(parse_plan("dp2.compile"), torch.device("cpu"))
    for plan in ("cp2.compile", "dp2.rc-selective.compile"):
        with pytest.raises(InputError, match="compile does not go with"):
            compiled.check_compiler(parse_plan(plan), torch.device("cpu"))
