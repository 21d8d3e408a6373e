"""What a script writes to the model's own parameters between two steps is trained with, as on one device, or refused in
one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from residual_model import RATE, adamw, batch, made
from torch import nn

from meshwright.core.errors import InputError
from meshwright.train.trainer import Trainer, parallelize

LIMIT, STEPS = 0.05, 4
NEAR = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Relative differences that are rounding."""

Weights = dict[str, torch.Tensor]


def write(model: nn.Module, how: str, rank: int = 0) -> None:
    """`clamp` scales too: wrong if it is made twice of one element, by a rank that reads what another one has written
    already."""
    if how == "replace":
        model.to("cpu:0")  # another device for torch than "cpu", so that each parameter is copied
    with torch.no_grad():
        for parameter in model.parameters():
            if how == "clamp":
                parameter.clamp_(-LIMIT, LIMIT).mul_(0.75)
            elif how == "data":
                parameter.data.clamp_(-LIMIT, LIMIT)
            elif how == "unlike":
                parameter.add_(rank * 0.25)


def alone(how: str) -> tuple[list[float], Weights]:
    model = made().double()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch(step)
        loss = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step < STEPS - 1:
            write(model, how)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def stepped(trainer: Trainer, step: int) -> tuple[float, str]:
    """The loss of a step, and the line that refused it."""
    try:
        return trainer.step(batch(step)).loss, ""
    except InputError as error:
        return 0.0, str(error)


def trained(plan: str, precision: str, how: str) -> tuple[list[float], Weights | None, str]:
    """Losses, weights, and the line that refused a step."""
    model = made()
    trainer = parallelize(model, adamw, plan, precision=precision)
    losses, said, weights = [], "", None
    for step in range(STEPS):
        loss, said = stepped(trainer, step)
        if said:
            break
        losses.append(loss)
        try:
            write(model, how if step < STEPS - 1 else "", trainer.mesh.rank)
        except InputError as error:
            said = str(error)
            break
    if not said:
        weights = trainer.full_state_dict()
    trainer.close()
    return losses, weights, said


PLANS = ["dp2", "dp2.z1", "dp2.z2", "dp2.z1.off-optimizer", "dp2.z2.off-optimizer-disk"]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(2)
def test_writes_between_steps_are_those_of_one_device(ranks: Any, plan: str, precision: str) -> None:
    losses, weights = alone("clamp")
    for ours, full, said in ranks.run(2, trained, plan, precision, "clamp"):
        assert not said
        assert ours == pytest.approx(losses, rel=NEAR[precision])
        for name, value in (full or {}).items():
            assert value.abs().max() < LIMIT + 1.2 * RATE
            if precision in ("fp64", "fp32"):  # the sign of a rounded gradient is that of a step of AdamW
                torch.testing.assert_close(value.double(), weights[name], rtol=NEAR[precision], atol=NEAR[precision])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(1)
def test_writes_in_bf16_leave_the_losses_of_one_rank(ranks: Any, plan: str) -> None:
    ((losses, _, said),) = ranks.once(1, trained, "dp1", "bf16", "clamp")
    assert not said
    for ours, _, _ in ranks.run(2, trained, plan, "bf16", "clamp"):
        assert ours == pytest.approx(losses, rel=2e-3)


@pytest.mark.parametrize(
    ("plan", "precision", "how", "reason"),
    [
        ("dp2.z3", "bf16", "clamp", "each rank stores only a shard"),
        ("tp2", "fp64", "clamp", "no rank holds the whole model"),
        ("tp2", "bf16", "clamp", "no rank holds the whole model"),
        ("pp2.mb2", "fp64", "clamp", "no rank holds the whole model"),
        ("dp2", "fp64", "unlike", "differently on rank 1 than on rank 0"),
        ("dp2.z1", "bf16", "unlike", "differently on rank 1 than on rank 0"),
        ("dp2.z2", "bf16", "data", "written to through .data"),
        ("dp2", "fp64", "replace", "was replaced after parallelize"),
        ("pp2.mb2", "fp64", "replace", "was replaced after parallelize"),
    ],
)
@pytest.mark.covering(3)
def test_writes_that_may_be_lost_are_refused_before_the_next_update(
    ranks: Any, plan: str, precision: str, how: str, reason: str
) -> None:
    for losses, _, said in ranks.run(2, trained, plan, precision, how):
        assert len(losses) == 1
        assert (
            (how == "replace" or said.startswith(f"plan {plan}: "))
            and reason in said
            and "with trainer.full_parameters(write=" in said
            and "\n" not in said
        )


def saved(plan: str) -> tuple[Weights | None, list[float]]:
    """What is saved after a write, and the losses around steps of the trainer's own that read and write weights."""
    model = made()
    trainer = parallelize(model, adamw, plan, precision="bf16", prove="start")
    trainer.step(batch(0))
    write(model, "clamp")
    weights = trainer.full_state_dict()
    with trainer.full_parameters(write=True) as full, torch.no_grad():
        for parameter in full.values():
            parameter.clamp_(-LIMIT / 2, LIMIT / 2)
    trainer.evaluate(batch(1))
    trainer.gradients(batch(1))
    assert trainer.prove(batch(1)).equal
    assert not trainer.engine.zero.external_writes.names
    trainer.step(batch(1))
    last = trainer.full_state_dict()
    trainer.close()
    return weights, [float(value.abs().max()) for value in (last or {}).values()]


@pytest.mark.parametrize("plan", [pytest.param("dp2.z1", marks=pytest.mark.soak), "dp2.z2.off-optimizer"])
def test_what_is_saved_holds_writes_and_the_trainers_own_are_none(ranks: Any, plan: str) -> None:
    for weights, last in ranks.run(2, saved, plan):
        assert all(value.abs().max() <= LIMIT + 1e-3 for value in (weights or {}).values())
        assert all(largest < LIMIT / 2 + 1.2 * RATE for largest in last)


def own(plan: str) -> list[float]:
    """Losses under a plan that refuses writes, around what the trainer itself does with weights."""
    model = made()
    trainer = parallelize(model, adamw, plan, precision="fp64", prove="start")
    losses = []
    for step in range(STEPS):
        losses.append(trainer.step(batch(step)).loss)
        with trainer.full_parameters(write=True):
            write(model, "clamp")
        trainer.evaluate(batch(step))
    trainer.close()
    return losses


@pytest.mark.parametrize("plan", [pytest.param("tp2", marks=pytest.mark.soak), "pp2.mb2"])
def test_writes_inside_of_full_parameters_pass_where_others_are_refused(ranks: Any, plan: str) -> None:
    for ours in ranks.run(2, own, plan):
        assert ours == pytest.approx(alone("clamp")[0], rel=1e-10)
