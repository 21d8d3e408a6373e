"""Replicas that go their own ways are those of one process that trains them in turn, meet when they should, and go on
from a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, difference, loss_of, make_batch, make_model, make_optimizer
from pool import Pool
from safetensors.torch import save_file
from torch import nn

from meshwright.core.errors import InputError
from meshwright.runtime.build.parallelize import make_parallel_context, parallelize_model
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import DilocoConfig, GradientCompression, recipe
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.meta_init import init_on_meta
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.trainer import Trainer, parallelize

RULE = DilocoConfig(replicas=2, steps=2, lr=0.7, momentum=0.9)
STEPS, CLIP = 5, 0.5


def trainer_of(plan: str, kind: str = "", rule: str = "") -> Trainer:
    asked = recipe("fp64").but(local=RULE, compression=GradientCompression(kind=kind) if kind else None)  # type: ignore[arg-type]
    optimizer = optimizer_factory(OptimizerConfig(name=rule)) if rule else make_optimizer  # type: ignore[arg-type]
    return parallelize(make_model("llama"), optimizer, plan, precision=asked, clip=CLIP, anatomy=anatomy_of("llama"))


def under(plan: str) -> dict[str, Any]:
    trainer = trainer_of(plan)
    records = [trainer.step(make_batch("llama", step)) for step in range(STEPS - 1)]  # the last of them is a meeting
    weights = trainer.full_state_dict()
    records.append(trainer.step(make_batch("llama", STEPS - 1)))
    return {"losses": [record.loss for record in records], "weights": weights, "last": trainer.full_state_dict()}


def simulated() -> dict[str, Any]:
    """One process: each replica with an optimizer of its own, and the outer one."""
    begun = make_model("llama").double()
    replicas = [copy.deepcopy(begun) for _ in range(RULE.replicas)]
    optimizers = [make_optimizer(replica.parameters()) for replica in replicas]
    velocity = [torch.zeros_like(weight) for weight in begun.parameters()]
    losses, met = [], {}
    for step in range(STEPS):
        batch = make_batch("llama", step)
        rows, total, count = len(batch["labels"]) // RULE.replicas, 0.0, 0
        for at, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            loss, labels = loss_of(
                replica, "llama", {name: value[at * rows : (at + 1) * rows] for name, value in batch.items()}
            )
            loss.backward()
            nn.utils.clip_grad_norm_(replica.parameters(), CLIP)
            optimizer.step()
            total, count = total + loss.item() * labels, count + labels
        losses.append(total / count)
        if (step + 1) % RULE.steps == 0:
            with torch.no_grad():
                for weight, moving, *theirs in zip(
                    begun.parameters(), velocity, *(one.parameters() for one in replicas), strict=True
                ):
                    moved = sum(weight - each for each in theirs) / RULE.replicas
                    moving.mul_(RULE.momentum).add_(moved)
                    weight -= RULE.lr * (moved + RULE.momentum * moving)
                    for each in theirs:
                        each.copy_(weight)
            met = {name: value.detach().clone() for name, value in begun.named_parameters()}
    return {
        "losses": losses,
        "weights": met,
        "last": {name: value.detach() for name, value in replicas[0].named_parameters()},
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return simulated()


LONGER = [
    pytest.param(plan, marks=pytest.mark.soak)
    for plan in ("dp2", "dp2x2.z1", "dp2x2.z2", "dp2.tp2.pp2.mb2", "dp2x2.cp2.z1.mb2")
]
PLANS = ["dp2x2.z3.mb2", *LONGER]


@pytest.mark.parametrize("plan", PLANS)
def test_replicas_that_meet_rarely_are_those_of_one_process(ranks: Pool, expected: dict[str, Any], plan: str) -> None:
    for found in ranks.run(parse_plan(plan).world, under, plan):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for held in ("weights", "last") if found["weights"] is not None else ():
            for name, weight in expected[held].items():
                assert difference(found[held][name], weight) < 1e-8, f"{held} of {name}"


def stopped(plan: str, rule: str, folder: str) -> list[list[float]]:
    """Losses of the steps after the third, in one go and after a checkpoint between two meetings."""
    whole, first, second = (trainer_of(plan, rule=rule) for _ in range(3))
    losses = [whole.step(make_batch("llama", step)).loss for step in range(STEPS)]
    for step in range(3):
        first.step(make_batch("llama", step))
    second.load(first.save(folder))
    return [losses[3:], [second.step(make_batch("llama", step)).loss for step in range(3, STEPS)]]


@pytest.mark.parametrize(
    ("plan", "rule"),
    [("dp2x2.z1", ""), *(pytest.param("dp2", rule, marks=pytest.mark.soak) for rule in ("muon", "adafactor"))],
)
def test_going_on_between_two_meetings_is_going_on(ranks: Pool, plan: str, rule: str, tmp_path: Path) -> None:
    for whole, resumed in ranks.run(parse_plan(plan).world, stopped, plan, rule, str(tmp_path)):
        assert whole == resumed


def sent() -> list[float]:
    """Bytes that cross in each step between two hosts."""
    from hosts import hosts

    with hosts(1):
        trainer = trainer_of("dp2", "int8")
    return [trainer.step(make_batch("llama", step)).sent["data"] for step in range(4)]


def test_replicas_send_nothing_until_they_meet_and_less_where_compressed(ranks: Pool) -> None:
    numel = sum(value.numel() for value in make_model("llama").parameters())
    for found in ranks.run(2, sent):
        assert found[0] == found[2] == 0.0
        assert found[1] == found[3] == pytest.approx(numel * 1.02, rel=0.06)


def refused(plan: str) -> str:
    try:
        parallelize_model(
            make_model("llama"), make_parallel_context(parse_plan(plan)), recipe("fp64").but(local=RULE), make_optimizer
        )
    except InputError as error:
        return str(error)
    return ""


def test_a_plan_of_other_replicas_is_refused_in_one_line(ranks: Pool) -> None:
    for said in ranks.run(2, refused, "dp2.z1"):
        assert "dp_replicate(1) is not workload.local.replicas(2)" in said and "\n" not in said


def from_weights(folder: str) -> list[float]:
    with init_on_meta():
        model = make_model("llama")
    asked = recipe("fp64").but(local=RULE)
    trainer = parallelize(model, make_optimizer, "dp2", precision=asked, clip=CLIP, anatomy=anatomy_of("llama"))
    trainer.load_weights(folder)
    return [trainer.step(make_batch("llama", step)).loss for step in range(STEPS)]


def test_replicas_that_start_from_weights_on_disk_meet_as_those_that_had_them(
    ranks: Pool, expected: dict[str, Any], tmp_path: Path
) -> None:
    save_file(make_model("llama").state_dict(), tmp_path / "model.safetensors")
    assert ranks.run(2, from_weights, str(tmp_path))[0] == pytest.approx(expected["losses"], rel=1e-10)
