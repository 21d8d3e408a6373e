"""Exact sums: the same bits for any number of data-parallel ranks at any ZeRO stage, and the numbers of one device
within the usual tolerance."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, make_batch, make_model, make_optimizer, measured

from meshwright.core.errors import InputError
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import recipe
from meshwright.train.trainer import Trainer, parallelize

ROWS = 12
PLANS = ["dp3.z1", "dp4.z3"]
MORE = [
    "dp2",
    "dp2x2.z2",
    "dp3",
    "dp4",
    "dp2.z1",
    "dp4.z1",
    "dp2.z2",
    "dp3.z2",
    "dp4.z2",
    "dp2.z3",
    "dp3.z3",
    "dp2x2.z1",
    "dp2x2.z3",
    "dp6.z2",
    "dp4.z3.rc-full",
]


def start(name: str, plan: str, precision: str) -> Trainer:
    kind = recipe(precision).but(exact=True)
    return parallelize(make_model(name), make_optimizer, plan, precision=kind, clip=0.5, anatomy=anatomy_of(name))


def run(name: str, plan: str, precision: str, steps: int) -> dict[str, Any]:
    trainer = start(name, plan, precision)
    records = [trainer.step(make_batch(name, step, ROWS)) for step in range(steps)]
    return {
        "losses": [record.loss for record in records],
        "norms": [record.gradient_norm for record in records],
        "skipped": [record.skipped for record in records],
        "weights": trainer.full_state_dict(),
        "evaluated": trainer.evaluate(make_batch(name, 99, ROWS)),
    }


def assert_equal_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not any(one["skipped"]) and min(one["norms"]) > 0.5  # it is clipped
    for what in ("losses", "norms", "evaluated"):
        assert one[what] == other[what], what
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


@pytest.fixture(scope="module")
def one(ranks: Any) -> Any:
    return functools.cache(lambda name, precision: ranks.run(1, run, name, "dp1", precision, 3)[0])


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.soak) for plan in MORE)])
def test_losses_norms_and_weights_are_the_same_bits_for_any_number_of_ranks(ranks: Any, one: Any, plan: str) -> None:
    assert_equal_bits(ranks.run(parse_plan(plan).world, run, "llama", plan, "fp32", 3)[0], one("llama", "fp32"))


@pytest.mark.parametrize(
    ("name", "plan", "precision"),
    [("gpt2", "dp3.z1", "bf16"), pytest.param("llama-tied", "dp2.z2", "fp64", marks=pytest.mark.soak)],
)
def test_so_they_are_in_other_precisions_and_with_tied_weights(
    ranks: Any, one: Any, name: str, plan: str, precision: str
) -> None:
    assert_equal_bits(ranks.run(parse_plan(plan).world, run, name, plan, precision, 3)[0], one(name, precision))


def compared(name: str, plan: str, precision: str) -> dict[str, Any]:
    return measured(start_clipped(name, plan, precision), name, 2)


def start_clipped(name: str, plan: str, precision: str) -> Trainer:
    return parallelize(
        make_model(name),
        make_optimizer,
        plan,
        precision=recipe(precision).but(exact=True),
        clip=1.0,
        anatomy=anatomy_of(name),
    )


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        pytest.param("dp2.z2", "fp64", marks=pytest.mark.soak),
        ("dp2.tp2.z1.mb2", "fp64"),
        pytest.param("pp2.z1", "fp32", marks=pytest.mark.soak),
    ],
)
def test_exact_sums_are_those_of_one_device(ranks: Any, plan: str, precision: str) -> None:
    results = ranks.run(parse_plan(plan).world, compared, "llama-tied", plan, precision)
    check(alone("llama-tied", precision, steps=2), results, precision)


class Burst:
    """In place of what takes the gradients of a unit: those of its first parameter come a billion times too large."""

    def __init__(self, unit: FlatParamGroup) -> None:
        self.take, self.victim = unit.accumulate_grad, next(iter(unit.parameters))

    def __call__(self, name: str, gradient: torch.Tensor) -> None:
        self.take(name, gradient * 1e9 if name == self.victim else gradient)


def burst(plan: str) -> list[bool]:
    """A finite gradient beyond what integers hold, on one rank, in the second step."""
    trainer = start("llama", plan, "fp32")
    unit, skipped = trainer.engine.zero.trainable[0], []
    whole = unit.accumulate_grad
    for step in range(3):
        unit.accumulate_grad = Burst(unit) if step == 1 and trainer.mesh.rank == 1 else whole  # type: ignore[method-assign]
        skipped.append(trainer.step(make_batch("llama", step, ROWS)).skipped)
    return skipped


@pytest.mark.parametrize("plan", ["dp2.z1", pytest.param("dp2.z3", marks=pytest.mark.soak)])
def test_a_gradient_too_large_for_the_sum_is_skipped_by_all_ranks_alike(ranks: Any, plan: str) -> None:
    assert ranks.run(2, burst, plan) == [[False, True, False]] * 2


def refused(what: str) -> str:
    try:
        if what == "fp16":
            start("llama", "dp1", "fp16")
        else:
            model = make_model("hf-gpt2")
            model.transformer.drop.p = 0.1  # type: ignore[union-attr]
            parallelize(model, make_optimizer, "dp1", precision=recipe("fp32").but(exact=True))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"), [("fp16", "exact: fp16 scales"), ("dropout", "exact: the model has dropout")]
)
def test_what_would_break_the_promise_is_refused_in_one_line(ranks: Any, what: str, words: str) -> None:
    found = ranks.run(1, refused, what)[0]
    assert found.startswith(words) and "\n" not in found
