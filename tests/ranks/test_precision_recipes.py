"""Recipes: what is kept in which type, rounded how, summed in what; on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, difference, make_batch, make_model, measured
from pool import unchecked

from meshwright.core.errors import InputError
from meshwright.runtime.float8 import Float8Layer, check_precision_support
from meshwright.runtime.optim.rule_probe import ELEMENTWISE, UpdateRule, check_update_rule
from meshwright.runtime.shard.low_bit import GlobalIndex, hash_key, random_bits, stochastic_round, stochastic_round_into
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import Recipe, recipe
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.trainer import Trainer, parallelize

RULE = OptimizerConfig(lr=1e-3)


def make_trainer(plan: str, chosen: Recipe, seed: int = 1) -> Trainer:
    return parallelize(
        make_model("llama"),
        optimizer_factory(RULE),
        plan,
        precision=chosen,
        clip=1.0,
        anatomy=anatomy_of("llama"),
        seed=seed,
    )


def train(plan: str, chosen: Recipe, steps: int, save: str = "") -> dict[str, Any]:
    return measured(make_trainer(plan, chosen), "llama", steps, save)


def go_on(plan: str, chosen: Recipe, steps: int, folder: str) -> dict[str, Any]:
    trainer = make_trainer(plan, chosen)
    trainer.load(folder)
    for _ in range(steps):
        trainer.step(make_batch("llama", trainer.steps))
    return {"weights": trainer.full_state_dict()}


def update_with(plan: str, chosen: Recipe, steps: int) -> dict[str, torch.Tensor] | None:
    """Steps whose gradients are the same numbers under every plan."""
    trainer = make_trainer(plan, chosen)
    engine = trainer.engine
    for step in range(steps):
        for unit in engine.zero.trainable:
            unit.gradients.shard.zero_()
            for name, offset in unit.layout.offsets.items():
                whole = torch.randn(engine.shapes[name], generator=torch.Generator().manual_seed(step + len(name)))
                first, last = (
                    max(offset, unit.shard_range.start),
                    min(offset + unit.parameters[name].numel(), unit.shard_range.stop),
                )
                if first < last:
                    local = share(trainer, name, whole)
                    unit.gradients.shard[first - unit.shard_range.start : last - unit.shard_range.start] = (
                        local.flatten()[first - offset : last - offset]
                    )
        engine.updater.step(trainer.optimizer, 1.0, step)
    return trainer.full_state_dict()


def share(trainer: Trainer, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What this tensor rank holds of it."""
    from meshwright.analysis.graph import local_shard

    split = trainer.engine.anatomy.splits.get(name) if trainer.plan.tp > 1 else None
    return whole if split is None else local_shard(whole, split, trainer.mesh.coords.tp, trainer.plan.tp)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_stochastic_rounding_is_right_on_average_and_never_further_than_a_neighbour() -> None:
    values = torch.full((200_000,), 1.0 + 2.0**-7 * 0.3)
    found = stochastic_round(values, random_bits(torch.arange(len(values)), hash_key(1))).float()
    assert set(found.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float((found > 1).double().mean()) == pytest.approx(0.3, abs=0.005)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.5])
    kept = stochastic_round(special, torch.full((5,), 65535, dtype=torch.int32)).float()
    assert kept[:2].tolist() == special[:2].tolist() and kept[2].isnan() and kept[3:].tolist() == [0.0, -0.5]


def test_an_element_is_rounded_alike_wherever_it_lies() -> None:
    values = torch.randn(40)
    whole, parts = torch.empty(40, dtype=torch.bfloat16), torch.empty(44, dtype=torch.bfloat16)
    stochastic_round_into(whole, values, [GlobalIndex("w", 0, 0, 40)], 7)
    apart = torch.cat([values[20:], torch.zeros(4), values[:20]])
    stochastic_round_into(parts, apart, [GlobalIndex("w", 24, 0, 20), GlobalIndex("w", 0, 20, 20)], 7)
    assert torch.equal(whole, torch.cat([parts[24:], parts[:20]]))


@pytest.mark.parametrize("plan", ["dp2.tp2.z3", "pp2"])
def test_pure_bfloat16_rounds_as_one_device_does_bit_for_bit(ranks: Any, plan: str) -> None:
    alone = ranks.once(1, update_with, "dp1", recipe("bf16-pure"), 3)[0]
    found = ranks.run(parse_plan(plan).world, update_with, plan, recipe("bf16-pure"), 3)[0]
    assert equal(alone, found)


@pytest.mark.parametrize("plan", ["dp2.z2", pytest.param("dp2.pp2.z1", marks=pytest.mark.soak)])
def test_eight_bit_states_are_those_of_one_device_bit_for_bit(ranks: Any, plan: str) -> None:
    chosen = recipe("fp32", state="8bit")
    assert equal(
        ranks.run(1, update_with, "dp1", chosen, 3)[0],
        ranks.run(parse_plan(plan).world, update_with, plan, chosen, 3)[0],
    )


@pytest.mark.soak
@pytest.mark.parametrize("chosen", [recipe("bf16-pure"), recipe("bf16", state="8bit"), recipe("fp32", "bf16")], ids=str)
def test_going_on_from_a_checkpoint_is_never_having_stopped(ranks: Any, tmp_path: Path, chosen: Recipe) -> None:
    plan = "dp2.z1"
    whole = ranks.run(2, train, plan, chosen, 3)[0]
    ranks.run(2, train, plan, chosen, 2, str(tmp_path))
    saved = next(path for path in tmp_path.iterdir() if path.name.startswith("step"))
    assert equal(whole["weights"], ranks.run(2, go_on, plan, chosen, 1, str(saved))[0]["weights"])


@pytest.mark.parametrize(
    ("chosen", "far"),
    [
        (recipe("bf16-pure"), 0.03),
        (recipe("bf16"), 0.02),
        pytest.param(recipe("fp16"), 0.02, marks=pytest.mark.soak),
        pytest.param(recipe("bf16", "bf16"), 0.02, marks=pytest.mark.soak),
        pytest.param(recipe("fp32", "bf16"), 0.02, marks=pytest.mark.soak),
        pytest.param(recipe("fp32", state="8bit"), 0.02, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_lossy_recipes_stay_near_float32_and_hold_the_bytes_that_they_say(
    ranks: Any, chosen: Recipe, far: float
) -> None:
    exact, found = (ranks.once(2, unchecked, train, "dp2.z1", each, 4)[0] for each in (recipe("fp32"), chosen))
    for mine, other in zip(found["losses"], exact["losses"], strict=True):
        assert abs(mine / other - 1) <= far
    weights = exact["bytes"]["parameters"] // 4
    states = 2 * RULE.but(state="8bit" if chosen.eight else None).state_bytes(chosen.state_size)
    expected = {"parameters": chosen.size, "gradients": chosen.gradient_size, "optimizer": (chosen.master + states) / 2}
    assert found["bytes"] == {kind: each * weights for kind, each in expected.items()}


def test_float8_products_are_near_exact_ones_forward_and_backward() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(32, 48, dtype=torch.bfloat16)
    layer = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    weight = layer.weight
    output = Float8Layer(layer).forward(x)
    output.backward(gradient)
    pairs = [(output, x @ weight.t()), (x.grad, gradient @ weight), (weight.grad, gradient.t() @ x)]
    for found, exact in pairs:
        assert float((found - exact).detach().float().norm() / exact.detach().float().norm()) <= 0.08


@pytest.mark.parametrize(("name", "line"), [("fp8", "capability 8.9 or newer"), ("tf32", "capability 8.0 or newer")])
def test_a_device_without_such_products_is_refused_in_one_line(name: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        check_precision_support(recipe(name), torch.device("cpu"))
    with pytest.raises(InputError, match="fp8 runs without zero-bubble schedules"):
        check_update_rule("cuda", ELEMENTWISE, recipe("fp8"), parse_plan("pp2.zbh1"))


def test_contradictory_recipes_are_refused_in_one_line() -> None:
    for given, line in (
        (("bf17",), "did you mean 'bf16'"),
        (("fp64", "fp32"), "leave reduce out"),
        (("bf16-pure", None, "8bit"), "cannot be combined with"),
        (("bf16", "fp33"), "did you mean 'fp32'"),
    ):
        with pytest.raises(InputError, match=line):
            recipe(*given)


class Slowing(torch.optim.Optimizer):
    """Goes down by lr / n in step n, which it counts for a group and not for each parameter."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.5, "count": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] / group["count"]


def counted(plan: str, precision: str, folder: str) -> tuple[list[int], float]:
    """The counts of an optimizer's groups after two steps, and by how much an element of its weights is another than it
    should be, at most."""
    trainer = parallelize(
        make_model("llama"), Slowing, plan, precision=precision, anatomy=anatomy_of("llama"), offload_to=folder
    )
    masters = [unit.optim_shard for unit in trainer.engine.zero.trainable]
    before = [torch.cat(master.parts).clone() for master in masters]
    for step in range(2):
        trainer.step(make_batch("llama", step))
    pairs = zip(before, [torch.cat(master.parts) for master in masters], strict=True)
    far = max(float((first - 0.75 - last).abs().max()) for first, last in pairs)
    trainer.close()
    return [group["count"] for group in trainer.optimizer.param_groups], far


@pytest.mark.parametrize(
    "given", [pytest.param(("dp1", "bf16"), marks=pytest.mark.soak), ("dp1.off-optimizer-disk", "fp32")], ids=str
)
def test_an_update_in_several_windows_is_one_step_of_the_optimizer(
    ranks: Any, tmp_path: Path, given: tuple[str, str]
) -> None:
    counts, far = ranks.run(1, counted, *given, str(tmp_path))[0]
    assert counts == [2] and far < 1e-6


@pytest.mark.parametrize("chosen", [recipe("bf16-pure"), recipe("fp32", state="8bit")], ids=str)
def test_low_bit_states_are_refused_for_optimizers_without_elementwise_states(
    chosen: Recipe,
) -> None:
    with pytest.raises(InputError, match="use AdamW, or another precision"):
        check_update_rule("cpu", UpdateRule(True, False), chosen, parse_plan("dp1"))


ROWS_OF_SUMS = 16


def errors_of_sums(plan: str, *recipes: Recipe) -> list[float]:
    """By recipe, on rank 0: the largest relative error of a weight's gradient in a step of micro-batches of one row.
    Exact is the float64 mean of the gradients of the micro-batches, each of which is a step of its own. All rows have
    equally many labels, and there is a power of two of micro-batches, so both divide the gradients of the passes by
    factors whose ratio is exact."""
    ids = torch.randint(0, 96, (ROWS_OF_SUMS, 16), generator=torch.Generator().manual_seed(7))
    exact: dict[str, torch.Tensor] = {}
    worst = []
    for chosen in recipes:
        trainer = make_trainer(plan, chosen)
        rows = ids.view(trainer.plan.dp, -1, 16)
        parts = [trainer.gradients({"input_ids": each, "labels": each})[2] for each in rows.unbind(1) if not exact]
        if parts:
            exact = {name: sum(part[name].double() for part in parts) / len(parts) for name in parts[0] or ()}
        whole = trainer.gradients({"input_ids": ids, "labels": ids})[2] or {}
        trainer.close()
        worst.append(
            max((difference(whole[name], mean) for name, mean in exact.items() if mean.norm() > 0), default=0.0)
        )
        exact = exact or {"": torch.zeros(())}
    return worst


@pytest.mark.parametrize(
    "plan",
    [
        *("dp2", "dp2.z1", "dp2.z2", "dp2.z3", "tp2", "tp2.sp", "pp2", "cp2.z2", "pp2.zbh1", "pp2.interleaved2"),
        *("dp2.tp2.z3", "dp2.pp2.z2"),
    ],
)
@pytest.mark.covering(2)
def test_gradients_of_many_micro_batches_are_summed_in_float32(ranks: Any, plan: str) -> None:
    """The same comparison finds sums in bfloat16 wrong."""
    recipes = recipe("bf16"), recipe("bf16", "bf16")
    wide, narrow = ranks.run(parse_plan(plan).world, unchecked, errors_of_sums, plan, *recipes)[0]
    assert wide <= 1e-6 and narrow >= 1e-3
