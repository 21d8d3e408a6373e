"""A split of weights or of the sequence is proven in training conditions, with gradients: equal to one device, or
refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_splits import ALONE, ALONG, alone, batch_of, is_equal, make, outcome, outcomes, sgd
from pool import unchecked
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

MIXED = [name for name in ALONG if name not in ("flip", "late")]
"""A rank's two chunks are each other's mirror images, so that context ranks flip a sequence exactly; what is late shows
in a long batch alone."""


FEW = ("first token", "length", "rare")
"""The cases that `make test` runs: a read of a position, a read of the length, and a small effect on the result."""


def few_and_others(few: list[str], every: list[str]) -> list[Any]:
    """Returns two test cases: the list `few` for `make test`, and the rest of `every` for `make soak`."""
    others = [way for way in every if way not in few]
    return [pytest.param(few, id="few"), pytest.param(others, id="others", marks=pytest.mark.soak)]


def check(ranks: Any, plan: str, ways: list[str], refused: str | None, *how: Callable[..., Any]) -> None:
    """Every rank says the same: that it is equal to one device, or, where `refused` is not None, a line with it and no
    other outcome. `how` the ranks call it."""
    results = ranks.run(parse_plan(plan).world, *how, outcomes, plan, ways)
    for number, way in enumerate(ways):
        found = [result[number] for result in results]
        if refused is None:
            assert not isinstance(found[0], str), f"{way}: {found[0]}"
            assert all(is_equal(one, way) for one in found), f"{way}: trained another model"
        else:
            assert all(isinstance(one, str) for one in found), (
                f"{way}: {'equal' if is_equal(found[0], way) else 'trained another model'}"
            )
            assert len(set(found)) == 1, f"{way}: {found}"
            assert refused in found[0], f"{way}: {found[0]}"
            assert "\n" not in found[0], f"{way}: {found[0]}"


IN_BLOCK = [f"in: {name}" for name in FEW] + ["in: late", "first block: first token", "training: mean", "gated: mean"]


@pytest.mark.parametrize("ways", few_and_others(IN_BLOCK, [f"in: {name}" for name in MIXED]))
def test_context_ranks_refuse_what_mixes_positions_in_a_block(ranks: Any, ways: list[str]) -> None:
    check(ranks, "cp2", ways, "plan cp2: cp(2) cannot split the sequence of Odd")


OUTSIDE = [f"between: {name}" for name in MIXED] + [
    f"behind: {name}" for name in MIXED if name not in ("length", "positions")
]


@pytest.mark.parametrize(
    "ways", few_and_others([*(f"between: {name}" for name in FEW), "behind: first token", "behind: rare"], OUTSIDE)
)
def test_context_ranks_refuse_what_mixes_positions_between_and_behind_blocks(ranks: Any, ways: list[str]) -> None:
    check(ranks, "cp2", ways, "plan cp2: cp(2) cannot split the sequence of Odd")


ALONE_CASES = [f"{place}: {name}" for place in ("in", "between", "behind") for name in ALONE]
ALONE_CASES += ["between: layer", "behind: length", "behind: positions", "zero gate"]


@pytest.mark.parametrize("way", ALONE_CASES)
@pytest.mark.covering(1)
def test_context_ranks_take_what_works_on_each_position_alone(ranks: Any, way: str) -> None:
    check(ranks, "cp2", [way], None, unchecked)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("cp2.pp2", ["first token", "length"]),
        *(
            pytest.param(plan, ["first token", "length", "positions"], marks=pytest.mark.soak)
            for plan in ("cp2.ulysses", "cp2.pp2")
        ),
    ],
)
def test_context_ranks_refuse_it_beside_other_axes(ranks: Any, plan: str, names: list[str]) -> None:
    check(
        ranks,
        plan,
        [f"in: {name}" for name in names],
        f"plan {parse_plan(plan).name}: cp(2) cannot split the sequence of Odd",
    )


TRAINING = [
    "training mean",
    "training width",
    "long width",
    "backward width",
    "masked width",
    "running mean",
    "columns normed",
    "max norm",
]
"""What a share of the features would do otherwise: in training, in a long batch, in backward, with an optional input,
by what it writes."""


SAID = {
    "running mean": "plan tp2: the value of the buffer blocks.0.seen depends on the rows of each pass",
    **dict.fromkeys(
        ("columns normed", "max norm"),
        "plan tp2: the model writes to its parameter blocks.0.up.weight in forward or backward",
    ),
}
"""What tp2 refuses by another rule than that of sequence parallelism."""


@pytest.mark.parametrize(
    ("plan", "ways"),
    [
        pytest.param("tp2", ["backward width", "max norm"], id="tp2-few"),
        *(pytest.param(plan, TRAINING, id=plan, marks=pytest.mark.soak) for plan in ("tp2", "tp2.sp")),
    ],
)
def test_tensor_ranks_are_equal_or_leave_whole_what_differs_on_a_share(ranks: Any, plan: str, ways: list[str]) -> None:
    results = ranks.run(2, outcomes, plan, ways)
    for number, way in enumerate(ways):
        found = [result[number] for result in results]
        if isinstance(found[0], str):
            assert any(found[0].startswith(words) for words in ("sp: ", SAID.get(way, "sp: "))), found[0]
            assert len(set(found)) == 1
        else:
            assert all(is_equal(one, way) for one in found), f"{way}: trained another model"


@pytest.mark.parametrize(
    "way",
    [
        *("training width", "long width", "masked width"),
        *(
            pytest.param(way, marks=pytest.mark.soak)
            for way in ("training mean", "backward width", "running mean", "columns normed", "max norm")
        ),
    ],
)
def test_a_region_that_trains_otherwise_on_a_share_stays_whole_with_the_reason(way: str) -> None:
    example = {key: value for key, value in batch_of(way).items() if key != "labels"}
    found = analyze_model(make(way), example=example)
    columns = [path for region in found.regions for path in region.columns]
    assert "blocks.0.qkv" in columns
    assert "blocks.0.up" not in columns, way
    assert any("up are not sharded" in line for line in found.findings), way


@pytest.mark.parametrize(
    "way", ["zero gate", *(pytest.param(way, marks=pytest.mark.soak) for way in ("nothing", "masked"))]
)
def test_a_region_that_trains_alike_on_shares_is_shared(way: str) -> None:
    example = {key: value for key, value in batch_of(way).items() if key != "labels"}
    found = analyze_model(make(way), example=example)
    assert {"blocks.0.up", "blocks.1.qkv"} <= {path for region in found.regions for path in region.columns}
    assert found.against_sequence == ""


def hook_after(factor: float) -> Any:
    def change(gradient_holder: nn.Parameter) -> None:
        assert gradient_holder.grad is not None
        with torch.no_grad():
            gradient_holder.grad.mul_(factor)

    return change


def hooked_after(plan: str, prove: Any, late: bool) -> tuple[str, list[float]]:
    """On a rank: the losses of a model with a hook after the gradient of a norm is accumulated, and why it is
    refused."""
    model = make("nothing")
    try:
        if not late:
            model.norm.weight.register_post_accumulate_grad_hook(hook_after(0.5))
        trainer = parallelize(model, sgd, plan, precision="fp64", prove=prove)
        if late and model.norm.weight.requires_grad:  # of a pipeline, the stage that holds it; the other hears of it
            model.norm.weight.register_post_accumulate_grad_hook(hook_after(0.5))
        return "", [trainer.step(batch_of("nothing")).loss for _ in range(2)]
    except InputError as error:
        return str(error), []


@pytest.mark.parametrize("prove", ["start", "never"])
@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3", "pp2", "cp2", "tp2"])
@pytest.mark.covering(1)
def test_hooks_after_the_gradient_is_accumulated_act_as_on_one_device(ranks: Any, plan: str, prove: str) -> None:
    expected = ranks.once(1, unchecked, hooked_after, "dp1.mb4", "never", False)[0][1]
    plain = alone("nothing")[2]
    assert abs(expected[1] / plain[1] - 1) > 1e-8  # the hook shows
    for refused, losses in ranks.run(2, hooked_after, plan, prove, False):
        assert not refused
        assert all(abs(one / other - 1) <= 1e-10 for one, other in zip(losses, expected, strict=True))
    found = ranks.run(2, hooked_after, plan, prove, True)
    assert all(
        "norm.weight got a post-accumulate-grad hook after parallelize, " in line and "\n" not in line
        for line, _ in found
    )


def hooked(plan: str, exponent: float) -> Any:
    """On a rank: loss, gradients and losses of a model with a gradient hook on a norm, or why the plan is refused."""
    return outcome(
        plan,
        "nothing",
        lambda model: model.norm.weight.register_hook(
            lambda gradient: 0.5 * gradient.sign() * gradient.abs() ** exponent
        ),
    )


@pytest.mark.parametrize("plan", ["cp2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("tp2", "pp2"))])
def test_a_nonlinear_gradient_hook_is_refused_where_ranks_have_gradient_shards(ranks: Any, plan: str) -> None:
    found = ranks.run(2, hooked, plan, 2.0)
    assert len(set(found)) == 1 and found[0].startswith(
        f"plan {plan}: the gradient hook of norm.weight is not linear, "
    )
    loss, gradients, _ = ranks.run(2, unchecked, hooked, plan, 1.0)[0]
    expected = alone("nothing")
    assert abs(loss / expected[0] - 1) <= 1e-10
    assert torch.allclose(gradients["norm.weight"], 0.5 * expected[1]["norm.weight"], rtol=1e-9)


def refuses(plan: str) -> Any:
    """On a rank: what becomes of a gradient hook that takes the gradients of its own model alone."""

    def picky(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("not mine\nat all")

    return outcome(plan, "nothing", lambda model: model.norm.weight.register_hook(picky))


def test_a_gradient_hook_that_takes_no_random_gradient_is_refused_in_one_line(ranks: Any) -> None:
    for line in ranks.run(2, refuses, "tp2"):
        assert (
            line.startswith(
                "plan tp2: the gradient hook of norm.weight fails with a random gradient (ValueError: not mine), "
            )
            and "\n" not in line
        )
