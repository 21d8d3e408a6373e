"""Compiled blocks compute what one device computes. The compiler's front and its derivatives run in every test (backend
`aot_eager`); code generation, which takes half a minute a block on a CPU, in the soak."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, make_batch, make_model, train
from test_peak_memory import expected, most
from world_group import between_hosts

from meshwright.core.errors import InputError
from meshwright.runtime import compile
from meshwright.runtime.tensor_parallel import chunks
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

PLANS = ("dp1.compile", "dp2.z3.mb2.compile", "tp2.mb4.compile", "tp2.sp.mb4.compile", "pp2.rc-full.compile",
         "pp2.zbh1.compile",
         "dp2.tp2.z1.mb2.compile", "pp2.off-activations.compile", "cp2.compile", "cp2.ulysses.compile",
         "cp4.ulysses2.z3.compile", "tp2.cp2.sp.compile", "pp2.interleaved2.cp2.rc-full.compile", "cp2.rc-attn.compile",
         "cp2.ulysses.rc-sac.compile", "dp1.mb4.rc-attn.compile", "dp2.z3.rc-attn.compile", "tp2.sp.rc-sac.compile",
         "pp2.interleaved2.rc-sac1.compile", "dp2.z3.rc-full1+sac.compile", "pp2.rc-sac.off-activations.compile",
         "pp2.zbh1.rc-sac.compile", "pp2.zbh1.rc-full1.compile", "dp2.z3.rc-attn.off-activations.compile",
         "pp2.off-activations-disk.compile", "dp1.mb4.rc-sac.off-activations-disk.compile")  # fmt: skip
ESTIMATED = ("dp1.mb8.compile", "dp2.z3.mb4.compile", "tp2.sp.mb8.compile", "pp2.mb4.compile", "cp2.mb8.compile",
             "dp1.mb8.rc-full.compile",
             "dp1.mb8.rc-attn.compile", "dp1.mb8.rc-sac.compile", "tp2.mb8.rc-sac.compile", "pp2.mb4.rc-sac1.compile",
             "pp2.mb4.zbv.compile")  # fmt: skip


@contextmanager
def by(backend: str) -> Iterator[None]:
    """Blocks are compiled by `backend`, anew."""
    import torch._dynamo

    before = os.environ.get(compile.COMPILER_ENV)
    os.environ[compile.COMPILER_ENV] = backend
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own, of tensors that it looks at
            yield
    finally:
        os.environ.pop(compile.COMPILER_ENV)
        if before is not None:
            os.environ[compile.COMPILER_ENV] = before


def train_with(backend: str, *given: Any) -> tuple[dict[str, Any], float]:
    """On every rank: what `train` returns, and the seconds that the compiler took."""
    with by(backend):
        began = compile.compile_seconds()
        return train(*given), compile.compile_seconds() - began


@pytest.mark.parametrize(
    "plan",
    [
        "dp1.mb4.rc-attn.compile",
        *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp1.compile", "cp2.compile", "dp1.rc-sac.compile")),
    ],
)
def test_compiled_blocks_compute_what_one_device_computes(ranks: Any, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_with, "aot_eager", "llama", plan, "fp64", 2)
    check(alone("llama", "fp64", 2), [result for result, _ in found], "fp64")
    assert all(seconds > 0 for _, seconds in found), "nothing was compiled, or torch counts it elsewhere"
    assert compile.first_step_message(12.0).endswith("the first step, which took 12.0 s")


def train_in_chunks(*given: Any) -> tuple[dict[str, Any], float]:
    """`train_with` over gloo, with row layers in as many chunks as there can be."""
    with between_hosts(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "MIN_TENSOR_CHUNK_BYTES", {"gloo": 1})
        return train_with(*given)


@pytest.mark.parametrize("plan", ["tp2.mb4.compile", "tp2.sp.mb4.compile"])
def test_compiled_row_layers_in_chunks_compute_what_one_device_computes(ranks: Any, plan: str) -> None:
    found = ranks.run(2, train_in_chunks, "aot_eager", "llama", plan, "fp64", 2)
    check(alone("llama", "fp64", 2), [result for result, _ in found], "fp64")


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["llama", "hf-llama", "gpt2"])
def test_compiled_blocks_go_with_every_strategy(ranks: Any, model: str, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_with, "aot_eager", model, plan, "fp64", 2)
    check(alone(model, "fp64", 2), [result for result, _ in found], "fp64")


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan", ["dp1.compile", "cp2.compile", "cp2.ulysses.compile", "dp1.rc-sac.compile", "dp1.rc-attn.compile"]
)
def test_generated_code_computes_what_one_device_computes(ranks: Any, plan: str) -> None:
    found = ranks.run(parse_plan(plan).world, train_with, "inductor", "llama", plan, "fp32", 2)
    check(alone("llama", "fp32", 2), [result for result, _ in found], "fp32")


def gradients_with(backend: str, name: str, plan: str) -> dict[str, torch.Tensor] | None:
    with by(backend):
        return parallelize(make_model(name), torch.optim.AdamW, plan, anatomy=anatomy_of(name)).gradients(
            make_batch(name, 0)
        )[2]


def check_bits(ranks: Any, backend: str, name: str, way: str) -> None:
    plain, kept = (ranks.run(1, gradients_with, backend, name, f"dp1.mb4{part}.compile")[0] for part in ("", f".{way}"))
    assert plain.keys() == kept.keys()
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


@pytest.mark.parametrize("way", ["rc-sac", pytest.param("rc-attn", marks=pytest.mark.soak)])
def test_what_the_compiler_makes_again_is_what_was_there(ranks: Any, way: str) -> None:
    """By the compiler's cuts and formulas, one operation at a time."""
    check_bits(ranks, "aot_eager_decomp_partition", "llama", way)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("way", ["rc-full", "rc-attn", "rc-sac"])
def test_generated_code_makes_again_what_was_there(ranks: Any, way: str, name: str) -> None:
    check_bits(ranks, "inductor", name, way)


def most_with(backend: str, *given: Any) -> float:
    with by(backend):
        return most(*given)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("plan", ESTIMATED)
def test_a_rank_of_compiled_blocks_allocates_what_the_estimate_says(ranks: Any, plan: str, model: str) -> None:
    measured = max(ranks.run(parse_plan(plan).world, most_with, "inductor", model, plan, "fp32"))
    assert expected(model, plan, "fp32") == pytest.approx(measured, rel=0.05)


def test_without_a_compiler_a_compiled_plan_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        compile.check_compiler(parse_plan("dp2.compile"), torch.device("cpu"))
