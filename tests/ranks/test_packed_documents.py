"""Attention over packed documents: by torch's varlen attention, of which these tests have a stand-in for CPUs, and by a
dense mask."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from equality import anatomy_of, check, loss_of, make_batch, make_model, make_optimizer, measured_on
from torch import nn

from meshwright.models import documents
from meshwright.models.documents import causal_attention, causal_varlen, document_bounds, document_mask
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

STEPS = 2
CALLS: list[torch.Size] = []


def attend_each(q: Any, k: Any, v: Any, starts: Any, ends: Any, most_q: int, most_k: int) -> torch.Tensor:
    """Computes the causal attention of each document on its own."""
    assert torch.equal(starts, ends) and starts.dtype == torch.int32
    assert int(starts.diff().max()) <= most_q == most_k
    CALLS.append(q.shape)
    parts = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        one = (each[first:last].transpose(0, 1) for each in (q, k, v))
        parts.append(nn.functional.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


def of_2_10(q: Any, k: Any, v: Any, a: Any, b: Any, c: int, d: int, is_causal: bool = False) -> torch.Tensor:
    assert is_causal and q.shape == k.shape == v.shape
    return attend_each(q, k, v, a, b, c, d)


def of_2_11(q: Any, k: Any, v: Any, a: Any, b: Any, c: int, d: int, *, window_size: Any = (-1, -1)) -> torch.Tensor:
    assert window_size == (-1, 0) and q.shape == k.shape == v.shape
    return attend_each(q, k, v, a, b, c, d)


def of_2_12(
    q: Any, k: Any, v: Any, a: Any, b: Any, c: int, d: int, *, window_size: Any = (-1, -1), enable_gqa: bool = False
) -> torch.Tensor:
    assert enable_gqa == (q.shape[1] != k.shape[1])
    shared = q.shape[1] // k.shape[1]
    return of_2_11(q, *(each.repeat_interleave(shared, 1) for each in (k, v)), a, b, c, d, window_size=window_size)


def places(rows: int, length: int) -> torch.Tensor:
    """Positions of documents of 1 to `length` tokens."""
    found = torch.stack([torch.arange(length) % (1 + 3 * row % length) for row in range(rows)])
    found[-1] = torch.arange(length)
    return found


@pytest.mark.parametrize("version", [of_2_10, of_2_11, of_2_12])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_attention_of_each_version_of_torch_equals_a_dense_mask(version: Any, kv_heads: int) -> None:
    position_ids = places(3, 12)
    gradients = []
    for mask in (document_mask(position_ids), document_bounds(position_ids)):
        torch.manual_seed(0)
        given = [
            torch.randn(3, heads, 12, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)
        ]
        with mock.patch.object(documents, "varlen_kernel", lambda: causal_varlen(version)):
            output = causal_attention(*given, mask)
        output.sin().sum().backward()
        gradients.append([output.detach(), *(each.grad for each in given)])
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max()) < 1e-12


def test_torch_has_the_arguments_of_the_latest_version_that_the_tests_know() -> None:
    assert documents.varlen_kernel() is not None
    with mock.patch.dict("sys.modules", {"torch.nn.attention.varlen": None}):
        documents.varlen_kernel.cache_clear()
        assert documents.varlen_kernel() is None
    documents.varlen_kernel.cache_clear()


def packed_batch(step: int) -> dict[str, torch.Tensor]:
    batch = make_batch("llama", step)
    return {**batch, "position_ids": places(*batch["input_ids"].shape)}


def train(name: str, plan: str) -> tuple[dict[str, Any], int]:
    CALLS.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(documents, "has_varlen_kernel", lambda hidden: True))
        stack.enter_context(mock.patch.object(documents, "varlen_kernel", lambda: causal_varlen(of_2_12)))
        trainer = parallelize(
            make_model(name), make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy_of(name), prove="never"
        )
        batches = [packed_batch(step) for step in range(STEPS)]
        return measured_on(trainer, batches, packed_batch(99)), len(CALLS)


def alone(name: str) -> dict[str, Any]:
    """What one device computes with a dense mask."""
    model = make_model(name).double()
    optimizer = make_optimizer(model.parameters())
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, count = loss_of(model, name, packed_batch(step))
        loss.backward()
        result["losses"].append(loss.item())
        if not step:
            gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            result |= {"first": loss.item(), "tokens": count, "gradients": gradients}
        result["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    result["weights"] = {name: each.detach() for name, each in model.named_parameters()}
    result["evaluated"] = loss_of(model, name, packed_batch(99))[0].item()
    return result


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "tp2.sp.mb2"),
        ("llama", "dp2.z3.rc-attn"),
        *(
            pytest.param(name, plan, marks=pytest.mark.soak)
            for name, plan in (
                ("gpt2", "dp1.mb2"), ("llama", "pp2.mb2"), ("llama", "cp2"), ("llama", "cp2.ulysses"),
                ("llama", "dp1.rc-full"), ("llama", "dp2.z1.rc-sac"), ("gpt2", "pp2.tp2.mb2"),
            )
        ),
    ],
)  # fmt: skip
def test_packed_documents_equal_one_device_by_varlen_attention(ranks: Any, name: str, plan: str) -> None:
    """A rank with a piece of the sequence has a dense mask."""
    given = parse_plan(plan)
    results = ranks.run(given.world, train, name, plan)
    check(alone(name), [result for result, _ in results], "fp64")
    assert all((calls > 0) == (given.cp == 1) for _, calls in results)
