"""Balance losses of transformers' mixtures: the loss and the gradients of one device that takes the same micro-batches,
under every plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equality import anatomy_of, difference, loss_of, make_batch, make_model, make_optimizer

from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import parallelize

COEFFICIENT = 0.5

SAMPLE = [
    ("mixtral", "dp2.ep2.z1.mb2"), ("mixtral", "tp2.sp.ep2.mb4"), ("qwen3-moe", "pp2.zbh1.mb4"),
    ("mixtral", "cp2.ep2.mb4.rc-full"), ("qwen2-moe", "dp2.pp2.ep2.z3.mb2.rc-full"),
]  # fmt: skip

WIDE = [
    (model, plan)
    for model in ("mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss", "olmoe", "granite-moe")
    for plan in ("dp1.mb8", "dp1", "tp2.mb2", "tp2.ep2", "pp2.mb2", "pp2.gpipe.mb8", "cp2.mb2", "cp2.ulysses.mb8",
                 "dp2.mb4", "dp2.ep2.z2", "dp2x1.z3.mb2",
                 "tp2.sp.pp2.mb2", "dp2.tp2.pp2.ep4.z3.mb2", "pp2.cp2.zbh1.mb2", "dp2.cp2.ep4.z1.mb2",
                 "dp2.pp2.z1.ga3-1.mb2", "tp2.sp.cp2.mb4.rc-full")
]  # fmt: skip


def balanced(name: str) -> Any:
    model: Any = make_model(name)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT
    return use_float64(model.double())


def batch_of(step: int, padded: bool) -> dict[str, torch.Tensor]:
    """Rows end in padding where `padded`, the last rows in much of it."""
    batch = make_batch("mixtral", step)
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for row in range(8):
            batch["attention_mask"][row, 16 - row :] = 0
            batch["labels"][row, 16 - row :] = -100
    return batch


def under_plan(name: str, plan: str, padded: bool) -> Any:
    """On every rank: the first loss and gradients, losses of two steps, the part of the balance loss in the first one,
    and the loss without it."""
    trainer = parallelize(balanced(name), make_optimizer, plan, precision="fp64", anatomy=anatomy_of(name))
    evaluated = trainer.evaluate(batch_of(0, padded))
    loss, _, gradients = trainer.gradients(batch_of(0, padded))
    records = [trainer.step(batch_of(step, padded)) for step in range(2)]
    return loss, gradients, [record.loss for record in records], records[0].experts.balance_loss, evaluated


@functools.cache
def alone(name: str, micro_batch: int, padded: bool) -> Any:
    """The same of one device: transformers' own balance loss of each micro-batch."""
    model = balanced(name)
    optimizer = make_optimizer(model.parameters())

    def backward(step: int) -> tuple[float, float]:
        optimizer.zero_grad()
        batch = batch_of(step, padded)
        labels = loss_of(model, name, batch)[0]
        inputs = {key: value.split(micro_batch) for key, value in batch.items() if key != "labels"}
        parts = [model(**{key: value[at] for key, value in inputs.items()}).aux_loss for at in range(8 // micro_batch)]
        balance = COEFFICIENT * torch.stack(parts).mean()
        (labels + balance).backward()
        return float((labels + balance).detach()), float(balance.detach())

    first, balance = backward(0)
    gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    losses = []
    for step in range(2):
        losses.append(backward(step)[0])
        optimizer.step()
    return first, gradients, losses, balance


@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("model", "plan"), [*SAMPLE, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in WIDE)])
@pytest.mark.covering(1)
def test_a_balance_loss_is_that_of_one_device_with_the_same_micro_batches(
    ranks: Any, model: str, plan: str, padded: bool
) -> None:
    first, expected, losses, balance = alone(model, parse_plan(plan).micro_batch, padded)
    results = ranks.run(parse_plan(plan).world, under_plan, model, plan, padded)
    for result in results:
        assert result[0] == pytest.approx(first, rel=1e-10) and result[2] == pytest.approx(losses, rel=1e-10)
        assert result[3] == pytest.approx(balance, rel=1e-10) and result[4] == pytest.approx(first - balance, rel=1e-10)
    for name, gradient in expected.items():
        if gradient.norm() > 1e-9:
            assert difference(results[0][1][name], gradient) < 1e-10, name


def test_a_balance_loss_of_another_form_is_refused_in_one_line() -> None:
    model = make_model("mixtral")
    model.config.output_router_logits = True  # type: ignore[union-attr, assignment]
    model.num_experts_per_tok = 0  # type: ignore[assignment]
    with pytest.raises(
        InputError, match="output_router_logits is true, but the balance loss of MixtralForCausalLM"
    ) as caught:
        parallelize(model, make_optimizer, "dp1")
    assert "\n" not in str(caught.value)


def sized() -> None:
    parallelize(balanced("mixtral"), make_optimizer, "dp2.mb3-1", anatomy=anatomy_of("mixtral"))


def test_a_balance_loss_over_micro_batches_of_unlike_sizes_is_refused_in_one_line(ranks: Any) -> None:
    with pytest.raises(
        Exception,
        match="mean over micro-batches, which must have equal sizes: use mb1, or set output_router_logits to false",
    ):
        ranks.run(2, sized)


RATE = 0.05


def biased() -> Any:
    model: Any = make_model("deepseek-v3")
    model.expert_bias_rate = RATE
    return use_float64(model.double())


@functools.cache
def moved_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps of one device, whose biases move by the counts of its routers, and the biases at the
    end."""
    model = biased()
    optimizer = make_optimizer(model.parameters())
    routers = {
        name: module for name, module in model.named_modules() if type(module).__name__ == "DeepseekV3TopkRouter"
    }
    counts: dict[str, torch.Tensor] = {}
    for name, module in routers.items():
        module.register_forward_hook(
            lambda module, given, output, name=name: counts.update(
                {name: torch.bincount(output[2].flatten(), minlength=8)}
            )
        )
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, "deepseek-v3", make_batch("deepseek-v3", step))[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, module in routers.items():
            module.e_score_correction_bias += RATE * torch.sign(counts[name].double().mean() - counts[name])
    return losses, {
        f"{name}.e_score_correction_bias": module.e_score_correction_bias for name, module in routers.items()
    }


def moved(plan: str, folder: str) -> Any:
    """On every rank: losses of two steps, saved, and of a third one of a new trainer; and the biases that this rank
    has."""
    trainer = parallelize(biased(), make_optimizer, plan, precision="fp64", anatomy=anatomy_of("deepseek-v3"))
    losses = [trainer.step(make_batch("deepseek-v3", step)).loss for step in range(2)]
    path = trainer.save(folder)
    again = parallelize(biased(), make_optimizer, plan, precision="fp64", anatomy=anatomy_of("deepseek-v3"))
    again.load(path)
    losses.append(again.step(make_batch("deepseek-v3", 2)).loss)
    return losses, {
        name: buffer for name, buffer in again.engine.model.named_buffers() if name.endswith("correction_bias")
    }


@pytest.mark.parametrize(
    "plan",
    ["dp2.ep2.z1.rc-full.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp3", "tp2.pp2.ep2.mb2"))],
)
def test_routers_biases_move_as_on_one_device_and_stand_in_checkpoints(ranks: Any, plan: str, tmp_path: Any) -> None:
    losses, biases = moved_alone()
    found: dict[str, torch.Tensor] = {}
    for said, here in ranks.run(parse_plan(plan).world, moved, plan, str(tmp_path)):
        assert said == pytest.approx(losses, rel=1e-10)
        found |= here
    assert found.keys() == biases.keys() and all(torch.equal(found[name], biases[name]) for name in biases)


def test_a_bias_rate_without_biases_is_refused() -> None:
    model: Any = make_model("mixtral")
    model.expert_bias_rate = RATE
    with pytest.raises(InputError, match="has 0 buffers with one number for each expert"):
        parallelize(model, make_optimizer, "dp1")
