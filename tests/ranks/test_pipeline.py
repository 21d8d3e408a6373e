"""Pipelines on real ranks: every schedule, every placement of stages, with every other strategy, equal to one
device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equality import (
    ROWS,
    alone,
    anatomy_of,
    check,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
    train,
    train_between_hosts,
)
from test_families import run_pair
from world_group import between_hosts

from meshwright.spec.constraints import batch_violations
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.schedules.schedule import schedule_orders
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("llama", "pp4.zbh1"), ("llama-tied", "pp2.zbv"), ("llama", "pp2.dualpipev.mb2"), ("llama-tied", "dp2.pp2.z1.zbv"),
    ("llama", "dp2.pp2.z2.zbh1"), ("llama-tied", "dp2.pp2.z3.zbv"), ("llama", "tp2.sp.pp2.zbh1.mb2"),
    ("hf-gpt2", "pp2.zbv.rc-full"), ("llama", "pp3.zbh1.mb2.ls1-1-2"),
]  # fmt: skip
LENGTHS = (16, 11, 20)


def listed(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Plan:
    """The plan that lists the actions of a schedule."""
    rows = tuple(" ".join(map(str, order)) for order in schedule_orders(schedule, pp, virtual_stages, micro_batches))
    return Plan(
        pp=pp, virtual_stages=virtual_stages, schedule="actions", actions=rows, micro_batch=ROWS // micro_batches
    )


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
@pytest.mark.covering(2)
def test_every_schedule_computes_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


APART = ["pp3.mb1", "pp2.gpipe.mb2", "pp2.interleaved2.mb2", "pp2.mb2.zbv", "pp2.mb1.dualpipev", "pp4.mb2.zbh1"]


@pytest.mark.parametrize("plan", APART)
@pytest.mark.covering(1)
def test_messages_between_hosts_are_those_that_are_awaited_without_any_tag(ranks: Any, plan: str) -> None:
    """As NCCL has it: whoever receives gets what was sent next, whatever it waits for. Receivers take messages in
    another order now and then."""
    found = ranks.run(parse_plan(plan).world, train_between_hosts, "llama-tied", plan, "fp64", 2)
    check(alone("llama-tied", "fp64", 2), found, "fp64")


def test_lengths_that_change_between_hosts_are_those_of_one_device(ranks: Any) -> None:
    """Forms come before messages of a new one, in the same line."""
    assert ranks.run(2, lengths_between_hosts, "pp2.mb2.zbv")[0] == pytest.approx(lengths_alone(), rel=1e-10)


def test_a_schedule_from_a_list_of_actions_computes_what_one_device_computes(ranks: Any) -> None:
    check(alone("llama-tied", "fp64", 2), ranks.run(2, train, "llama-tied", listed("zbv", 2, 2, 4), "fp64", 2), "fp64")


@pytest.mark.parametrize(
    "plan", ["pp2.mb4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp4.zbh1.mb2", "pp2.zbv.mb2"))]
)
def test_an_encoder_decoder_is_a_pipeline_over_both_of_its_stacks(ranks: Any, plan: str) -> None:
    assert not isinstance(run_pair(ranks, "t5", plan), str)


def cut(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """The batch with rows of `length`, repeated where they are shorter."""
    return {name: torch.cat([value, value], dim=1)[:, :length] for name, value in batch.items()}


def uneven(step: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of unlike lengths."""
    return [cut(make_batch("llama", 10 * step + at, rows=2), length) for at, length in enumerate(LENGTHS)]


def lengths(plan: str) -> list[float]:
    """On every rank: losses of steps whose batches, then micro-batches, differ in length, and of an evaluation."""
    trainer = parallelize(make_model("llama"), make_optimizer, plan, precision="fp64", anatomy=anatomy_of("llama"))
    found = [trainer.step(cut(make_batch("llama", step), length)).loss for step, length in enumerate(LENGTHS)]
    found += [trainer.step(LocalBatch(uneven(step))).loss for step in range(2)]
    found.append(trainer.evaluate(LocalBatch(uneven(7))))
    trainer.close()
    return found


def lengths_between_hosts(plan: str) -> list[float]:
    with between_hosts():
        return lengths(plan)


@functools.cache
def lengths_alone() -> list[float]:
    model = make_model("llama").double()
    optimizer = make_optimizer(model.parameters())

    def loss(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        parts = [loss_of(model, "llama", batch) for batch in batches]
        return sum(mean * count for mean, count in parts) / sum(count for _, count in parts)

    found = []
    for batches in [
        *([cut(make_batch("llama", step), length)] for step, length in enumerate(LENGTHS)),
        uneven(0),
        uneven(1),
    ]:
        optimizer.zero_grad()
        found.append(loss(batches))
        found[-1].backward()
        optimizer.step()
    with torch.no_grad():
        return [*(float(one) for one in found), float(loss(uneven(7)))]


@pytest.mark.parametrize("plan", ["pp2.mb2", pytest.param("pp2.zbv", marks=pytest.mark.soak)])
def test_micro_batches_may_differ_in_length_and_every_rank_knows_the_loss(ranks: Any, plan: str) -> None:
    results = ranks.run(2, lengths, plan)
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(lengths_alone(), rel=1e-10)


def beside_schedules() -> list[tuple[str, str]]:
    """Every schedule with every other strategy on 2, 3, 4, 6 and 8 ranks."""
    partners = [
        "",
        "dp2.z1",
        "dp2.z2",
        "dp2.z3",
        "dp2.z3.rc-full",
        "tp2",
        "tp2.sp",
        "rc-full",
        "rc-attn",
        "mb2",
        "cp2.z1",
    ]
    schedules = ["", "gpipe", "interleaved2", "zbh1", "zbv", "dualpipev"]
    found = []
    for model in ("llama", "llama-tied", "hf-gpt2", "bert"):
        for pp in (2, 3, 4):
            for schedule in schedules:
                for partner in partners:
                    plan = parse_plan(".".join(filter(None, [f"pp{pp}", schedule, partner])))
                    wide = plan.world > 8 or plan.stages > 4 or (plan.cp > 1 and model == "bert")
                    if not wide and not any(batch_violations(plan, 8)):
                        found.append((model, plan.name))
    return found


@pytest.mark.soak
def test_every_schedule_with_every_other_strategy_computes_what_one_device_computes(ranks: Any, sweep: Any) -> None:
    def judge(model: str, plan: str) -> tuple[float, float]:
        return check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")

    sweep("schedules", "Every schedule with every other strategy", beside_schedules(), judge)


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan", ["dp2.pp2.z3.zbh1.mb2", "tp2.pp2.mb4", "pp2.rc-full.mb4", "dp2.pp4.z1.zbh1.mb1", "pp2.dualpipev.mb2"]
)
@pytest.mark.parametrize("model", ["t5", "mpnet", "deberta"])
def test_models_whose_blocks_share_more_than_a_hidden_state_are_pipelines(ranks: Any, model: str, plan: str) -> None:
    found = run_pair(ranks, model, plan)
    assert not isinstance(found, str) or "need at least one block each" in found or "tp" in found
