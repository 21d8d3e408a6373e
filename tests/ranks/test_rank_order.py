"""Ranks in another order: pipeline ranks on the groups that a plan names, axes from the outermost to the innermost as
it says. The loss stays that
of one device, also where process groups of torch carry everything."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from equality import alone, check, train, train_between_hosts

from meshwright.core.errors import InputError
from meshwright.spec.grid import RankGrid, rank_strides
from meshwright.spec.plan import parse_plan

SAMPLE = [
    ("llama", "dp2.pp2.z1.ls3-1.place1-0"), ("llama", "dp2.tp2.pp2.z3.mb2.order-dp-pp-tp"),
    ("llama-tied", "dp2.pp2.z2.order-dp-pp-tp"), ("gpt2", "tp2.pp2.mb2.order-tp-dp-pp"),
    ("llama", "dp2x2.z1.pp2.order-pp-tp-dp"), ("llama-tied", "pp4.place1-0-1-0.mb2"),
]  # fmt: skip
MORE = [(model, plan) for model in ("llama", "llama-tied", "gpt2", "bert") for plan in (
    *(f"dp2.tp2.sp.pp2.z{zero}.mb2.ax-{axes}"
      for zero, axes in enumerate(("pp-tp-dp", "dp-tp-pp", "tp-pp-dp", "tp-dp-pp"))),
    "dp2.pp2.z3.gpipe.place1-0", "dp2.pp4.z1.ls1-1-1-1.place0-1-1-0", "pp2.tp2.mb2.zbv.order-dp-tp-pp")]  # fmt: skip


@pytest.mark.parametrize(("model", "plan"), [pytest.param(*pair, marks=pytest.mark.soak) for pair in SAMPLE])
def test_ranks_in_another_order_train_to_the_loss_of_one_device(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.parametrize(("model", "plan"), [SAMPLE[0], pytest.param(*SAMPLE[1], marks=pytest.mark.soak)])
def test_ranks_in_another_order_between_hosts_train_to_the_loss_of_one_device(
    ranks: Any, model: str, plan: str
) -> None:
    check(
        alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train_between_hosts, model, plan, "fp64", 2), "fp64"
    )


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), MORE)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_ranks_in_every_order_train_to_the_loss_of_one_device(
    ranks: Any, model: str, plan: str, precision: str
) -> None:
    check(alone(model, precision, 2), ranks.run(parse_plan(plan).world, train, model, plan, precision, 2), precision)


@pytest.mark.parametrize(
    "name", ["dp2x3.tp2.pp4.z1.order-tp-pp-dp", "dp2.cp2.pp3.z3.order-dp-pp-tp", "dp3.pp4.z1.place1-0-1-0"]
)
def test_every_rank_has_one_place_and_axes_lie_as_far_apart_as_the_plan_says(name: str) -> None:
    plan = parse_plan(name)
    grid = RankGrid(plan)
    assert sorted(grid.rank(grid.place(rank)) for rank in range(plan.world)) == list(range(plan.world))
    for axis, stride in rank_strides(plan).items():
        ranks = grid.along(0, axis)
        assert axis == "pp" or all(after - before == stride for before, after in pairwise(ranks))


def test_placed_ranks_hold_the_devices_of_their_group() -> None:
    plan = parse_plan("dp3.pp4.z1.place1-0-1-0")
    by_stage = [{rank for rank in range(12) if RankGrid(plan).place(rank).pp == pp} for pp in range(4)]
    assert by_stage == [{6, 7, 8}, {0, 1, 2}, {9, 10, 11}, {3, 4, 5}]


def test_a_placement_that_would_tear_groups_apart_is_refused_in_one_line() -> None:
    with pytest.raises(InputError) as error:
        parse_plan("dp2.pp2.place0-1.order-dp-pp-tp")
    assert "must begin with pp" in str(error.value) and "\n" not in str(error.value)
