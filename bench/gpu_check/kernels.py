"""Part D, kernels: compares float8 products with products of the rounded factors in float32, steps that reuse the casts
of weights with steps that do not, and torch's varlen attention over packed documents with a dense mask.

`python -m bench.gpu_check.kernels` runs these checks alone, in some two minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from bench.gpu_check.common import TINY, Bench, Findings, build_model, first_line, free_memory, make_batch
from bench.gpu_check.memory import SIZES

import meshwright as mw
from meshwright.models.documents import DocumentBounds, causal_attention, document_bounds, document_mask, varlen_kernel
from meshwright.runtime import float8
from meshwright.spec.precision import recipe
from meshwright.train import trainer

PRODUCT_TOLERANCE = 0.01
"""Relative difference of a float8 product in bfloat16 to the float32 product of the same factors."""

ATTENTION_TOLERANCE = 1.5
"""Error of varlen attention in bfloat16 divided by that of a dense mask. Float32 is exact."""

DOCUMENT_LOSS_TOLERANCE = 1e-3
"""Relative difference in bfloat16 of a loss over packed documents."""

REPEATS = 5


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def product_difference(device: torch.device, tokens: int, inputs: int, outputs: int) -> float:
    """Largest relative difference of a layer's output and gradients to the products of the same factors in float32.
    `tokens` may be any number."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device, requires_grad=True)
    gradient = torch.randn(tokens, outputs, dtype=torch.bfloat16, device=device)
    products = float8.Float8Layer(layer)
    undo = layer.weight.detach().abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
    products.prepare(undo, is_cached=True)
    output = products.forward(x)
    output.backward(gradient)

    def exact(factor: float8.Float8Factor) -> torch.Tensor:
        return factor.values.float() * factor.undo

    with torch.no_grad():
        left, weight = exact(float8.input_factor(x)), exact(float8.weight_factor(*products.operand()))
        right = exact(float8.gradient_factor(gradient))
        pairs = [(output, left @ weight.t()), (x.grad, right @ weight), (layer.weight.grad, right.t() @ left)]
    return max(difference(found, other) for found, other in pairs if found is not None)


def float8_trainer(sizes: dict[str, Any]) -> Any:
    with patch.object(trainer, "check_precision_support"):  # `--cpu` runs this part too
        return mw.parallelize(
            build_model(sizes), lambda params: torch.optim.AdamW(params, lr=3e-4), "dp1.mb1", precision=recipe("fp8")
        )


def cast_difference(sizes: dict[str, Any], device: torch.device) -> tuple[float, dict[bool, float]]:
    """Largest difference of a gradient of four micro-batches with reused casts to one with a cast for each pass, which
    is 0, and the seconds of a step with and without reused casts."""
    batch, gradients, seconds = make_batch(sizes, 4), {}, {}
    for is_cached in (True, False):
        free_memory(device)
        one = float8_trainer(sizes)
        one.engine.float8_casts.is_cached = is_cached
        gradients[is_cached] = one.gradients(batch)[2]
        seconds[is_cached] = timed(partial(one.step, batch), device)
        one.close()
    apart = (float((value - gradients[False][name]).abs().max()) for name, value in gradients[True].items())
    return max(apart), seconds


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of a call, after one that is not counted."""
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def document_positions(rows: int, length: int) -> torch.Tensor:
    """Positions of documents of different lengths. The last row is one document."""
    found = torch.arange(length).repeat(rows, 1)
    for row in range(rows - 1):
        found[row] %= max(length // (5 + 2 * row), 1)
    return found


def attention_errors(
    device: torch.device, shape: tuple[int, int, int, int, int]
) -> tuple[dict[str, float], dict[str, float]]:
    """By kernel, the largest error of the output and gradients in bfloat16, and the seconds of forward and backward.
    `shape`: rows, heads, key-value heads, tokens, features of a head."""
    rows, heads, shared, length, width = shape
    places = document_positions(rows, length).to(device)
    torch.manual_seed(0)
    base = [torch.randn(rows, number, length, width, device=device) for number in (heads, shared, shared)]
    results: dict[str, list[torch.Tensor]] = {}
    seconds: dict[str, float] = {}

    def attend(dtype: torch.dtype, mask: torch.Tensor | DocumentBounds) -> list[torch.Tensor]:
        given = [each.detach().to(dtype).requires_grad_() for each in base]
        output = causal_attention(given[0], given[1], given[2], mask)
        output.float().sin().sum().backward()
        return [output.detach(), *(each.grad for each in given if each.grad is not None)]

    dense = document_mask(places)
    results["float32"] = attend(torch.float32, dense)
    for name, mask in (("dense", dense), ("varlen", document_bounds(places))):
        results[name] = attend(torch.bfloat16, mask)
        seconds[name] = timed(partial(attend, torch.bfloat16, mask), device)
    errors = {
        name: max(difference(one, other) for one, other in zip(results[name], results["float32"], strict=True))
        for name in seconds
    }
    return errors, seconds


def document_losses(sizes: dict[str, Any], plan: str, is_dense: bool) -> float:
    """The second loss of a model over packed documents."""
    model, batch = build_model(sizes), make_batch(sizes, 4)
    model.model.needs_dense_mask = model.model.needs_dense_mask or is_dense  # type: ignore[union-attr]
    batch["position_ids"] = document_positions(4, sizes["seq"])
    made = mw.parallelize(model, lambda params: torch.optim.AdamW(params, lr=3e-4), plan, precision="bf16")
    losses = [made.step(batch).loss for _ in range(2)]
    made.close()
    return float(losses[1])


def check_float8(found: Findings, bench: Bench) -> None:
    wide = (96, 64, 48) if bench.tiny else (4096, 4096, 11008)
    for tokens, inputs, outputs in (wide, (wide[0] - 7, wide[1] - 8, wide[2] - 8)):
        apart = product_difference(bench.device, tokens, inputs, outputs)
        text = f"fp8: products {tokens} x {inputs} x {outputs} of the rounded factors within {PRODUCT_TOLERANCE}"
        found.claim(text, f"{apart:.1e}", apart <= PRODUCT_TOLERANCE)
    apart, seconds = cast_difference(TINY if bench.tiny else SIZES, bench.device)
    found.data["fp8_casts"] = {"difference": apart, "reused": seconds[True], "each_pass": seconds[False]}
    found.claim("fp8: gradients with reused casts equal those with a cast for each pass", f"{apart:.1e}", apart == 0)
    found.claim(
        "fp8: step with reused casts, relative to a cast for each pass", f"{seconds[True] / seconds[False]:.3f}"
    )


def check_documents(found: Findings, bench: Bench) -> None:
    if bench.tiny or varlen_kernel() is None:
        found.claim("packed documents by varlen attention", f"not in torch {torch.__version__} on {bench.name}")
        return
    for shape in ((2, 32, 8, 4096, 128), (3, 16, 16, 2048, 64)):
        errors, seconds = attention_errors(bench.device, shape)
        name = "packed documents {} x {} heads ({} kv) x {} x {}".format(*shape)
        found.data[name] = {"errors": errors, "seconds": seconds}
        text = f"{name}: error of varlen attention at most {ATTENTION_TOLERANCE} x that of a dense mask"
        figures = f"{errors['varlen']:.1e} and {errors['dense']:.1e}"
        found.claim(text, figures, errors["varlen"] <= ATTENTION_TOLERANCE * errors["dense"])
        found.claim(f"{name}: speed of varlen attention", f"{seconds['dense'] / seconds['varlen']:.1f} x a dense mask")
    for plan in ("dp1.mb2", "dp1.mb2.rc-attn", "dp1.mb2.compile"):
        one, other = (document_losses(SIZES, plan, is_dense) for is_dense in (False, True))
        text = f"packed documents, {plan}: second loss that of a dense mask within {DOCUMENT_LOSS_TOLERANCE}"
        found.claim(text, f"{abs(one / other - 1):.1e}", abs(one / other - 1) <= DOCUMENT_LOSS_TOLERANCE)


def check_kernels(found: Findings, bench: Bench) -> None:
    """Adds the claims of this file to `found`. An error is a missed claim."""
    for check in (check_float8, check_documents):
        try:
            check(found, bench)
        except Exception as error:
            found.claim(f"{check.__name__} runs", first_line(error), False)


def main() -> None:
    found = Findings()
    check_kernels(found, Bench(torch.device("cuda", 0), "local:1"))
    for claim in found.claims:
        print(f"{claim.text}: {claim.figure} [{claim.verdict}]", flush=True)


if __name__ == "__main__":
    main()
